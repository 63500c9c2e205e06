/** The command line that started the server, for what the page tells people to start in its place. */

import { now } from "./stats";

/** The command with these flags, each with its value if it has one. A flag that it has already stays as it is. */
export const commandWith = (...flags: string[]): string => added(now.value?.command || "mlx_parallm_serve", flags);

export const added = (command: string, flags: readonly string[]): string =>
  [command, ...flags.filter((flag) => !has(command, flag.split(" ", 1)[0] ?? ""))].join(" ");

/** More names of flags. */
const OTHERS: Readonly<Record<string, readonly string[]>> = { "--checkpoint-dir": ["--run", "--resume"] };

const has = (command: string, name: string): boolean =>
  command.split(" ").some((word) => [name, ...(OTHERS[name] ?? [])].includes(word.split("=", 1)[0] ?? ""));
