/** Short messages about what a person has just done: `toast("Paused")`, or `failed(error)` in the error's words. */

import { signal } from "@preact/signals";
import { inWords } from "./fields";

interface Message {
  id: number;
  text: string;
  wrong: boolean;
}

const SHOWN_MS = 8000;
export const messages = signal<readonly Message[]>([]);
let last = 0;

export function toast(text: string, wrong = false): void {
  if (!wrong) {
    succeeded();
  }
  last += 1;
  const message = { id: last, text, wrong };
  messages.value = [...messages.value, message];
  setTimeout(() => drop(message), SHOWN_MS);
}

/** Drops what was said of actions that failed, because one has succeeded since. */
export const succeeded = (): void => {
  messages.value = messages.value.filter((each) => !each.wrong);
};

/** Shows why an action failed; in the server's own sentence, such as about the role that is needed. */
export const failed = (error: unknown): void =>
  toast(error instanceof Error ? inWords(error.message) : String(error), true);

const drop = (message: Message): void => {
  messages.value = messages.value.filter((each) => each !== message);
};

export const Toasts = () => (
  <div class="toasts" role="status">
    {messages.value.map((message) => (
      <p key={message.id} class={message.wrong ? "wrong" : ""}>
        {message.text}
        <button type="button" aria-label="Close" onClick={() => drop(message)}>
          ×
        </button>
      </p>
    ))}
  </div>
);
