/** Control of the whole server, which needs a key with the role admin. */

import { post } from "./client";

/** Requests under way stop where they are, and new ones wait, until `resume`. */
export const pause = (): Promise<unknown> => post("/pause?mode=keep");

export const resume = (): Promise<unknown> => post("/resume");
