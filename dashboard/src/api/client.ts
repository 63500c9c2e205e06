/** One way to ask the server, with its errors as exceptions. The cookie of the login page goes along by itself. */

import { signal } from "@preact/signals";

const TIMEOUT_MS = 8000;

/** True after the server has refused the cookie: the session has ended, or its key was removed. */
export const loggedOut = signal(false);

/** The server refused a request. `message` is its own sentence, which says what to change. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    /** The field of the request that is wrong; empty if it is none. */
    readonly param = "",
  ) {
    super(message);
    this.name = "ApiError";
  }
}

/** No answer came: the server is down, or the network is. */
export class ConnectionError extends Error {
  constructor() {
    super("The server does not answer.");
    this.name = "ConnectionError";
  }
}

export const get = <T>(path: string): Promise<T> => ask<T>("GET", path);

export const post = <T>(path: string, body: object = {}): Promise<T> => ask<T>("POST", path, body);

export const remove = <T>(path: string): Promise<T> => ask<T>("DELETE", path);

async function ask<T>(method: string, path: string, body?: object): Promise<T> {
  const answer = await send(path, {
    method,
    signal: method === "GET" ? AbortSignal.timeout(TIMEOUT_MS) : null,
    ...(body && { body: JSON.stringify(body), headers: { "content-type": "application/json" } }),
  });
  return (await answer.json()) as T;
}

/** The response, if it is a success. Raises ApiError, or ConnectionError if there is none. */
export async function send(path: string, options: RequestInit): Promise<Response> {
  const answer = await fetch(path, options).catch((error: unknown) => {
    throw options.signal?.aborted && isAbort(error) ? error : new ConnectionError();
  });
  if (answer.ok) {
    return answer;
  }
  loggedOut.value ||= answer.status === 401;
  throw await errorOf(answer);
}

const isAbort = (error: unknown): boolean => error instanceof DOMException && error.name === "AbortError";

async function errorOf(answer: Response): Promise<ApiError> {
  const body = await answer.json().catch(() => null);
  const { code, message = `The server answered ${answer.status}.`, param } = body?.error ?? {};
  return new ApiError(answer.status, code ?? "", message, param ?? "");
}
