/** Splits server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) from pieces of text. */

export interface Message {
  /** The last `id` of the stream so far; empty if it had none. */
  id: string;
  /** The `event` field, or `message`. */
  kind: string;
  data: string;
}

export class EventParser {
  #rest = "";
  #id = "";
  #kind = "";
  #data: string[] = [];

  /** The messages that end in this piece. */
  push(piece: string): Message[] {
    const lines = (this.#rest + piece).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop() ?? "";
    return lines.flatMap((line) => this.#line(line));
  }

  #line(line: string): Message[] {
    if (line === "") {
      return this.#end();
    }
    const [, name, value] = /^([^:]*)(?:: ?(.*))?$/s.exec(line) ?? [];
    if (name === "id" && !value?.includes("\0")) {
      this.#id = value ?? "";
    } else if (name === "event") {
      this.#kind = value ?? "";
    } else if (name === "data") {
      this.#data.push(value ?? "");
    }
    return [];
  }

  #end(): Message[] {
    const message = { id: this.#id, kind: this.#kind || "message", data: this.#data.join("\n") };
    const empty = this.#data.length === 0;
    this.#kind = "";
    this.#data = [];
    return empty ? [] : [message];
  }
}
