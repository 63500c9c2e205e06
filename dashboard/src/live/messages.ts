import { EventParser, type Message } from "./parser";

/** The server-sent events of a response, as they come. */
export async function* messagesOf(answer: Response): AsyncGenerator<Message> {
  const parser = new EventParser();
  const pieces = answer.body?.pipeThrough(new TextDecoderStream()).getReader();
  for (let piece = await pieces?.read(); piece && !piece.done; piece = await pieces?.read()) {
    yield* parser.push(piece.value);
  }
}
