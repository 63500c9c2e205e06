/** How strongly a token is tinted, and how its figures are written. */

import type { Group, Token } from "../../api/trajectories";
import { rarity } from "../../components/rarity";
import { number, percent } from "../../format";

export const TINTS = ["advantage", "logprob"] as const;

export type Tint = (typeof TINTS)[number];

export const isTint = (value: string | undefined): value is Tint => TINTS.some((tint) => tint === value);

/** Tints of one colour. */
const STEPS = 4;

/** The largest advantage of a group's tokens, whatever its sign; 0 if there is none. */
export const largestAdvantage = (group: Group): number =>
  Math.max(
    0,
    ...group.members.flatMap((sample) =>
      sample.turns.map((turn) =>
        turn.tokens.reduce((most, { advantage }) => Math.max(most, Math.abs(advantage ?? 0)), 0),
      ),
    ),
  );

/** The names of the token's looks in components.css. `largest`: the advantage that has the strongest tint. */
export function lookOf(token: Token, tint: Tint, largest: number): string {
  if (token.context) {
    return "context";
  }
  if (tint === "logprob") {
    return token.logprob === null ? "" : rarity(Math.exp(token.logprob));
  }
  const { advantage } = token;
  if (!advantage || largest === 0) {
    return "";
  }
  const step = Math.max(1, Math.round((STEPS * Math.abs(advantage)) / largest));
  return advantage > 0 ? `more more-${step}` : `less less-${step}`;
}

/** `+0.5`, `−0.5`. */
export const signed = (value: number): string =>
  value < 0 ? `−${number(-value)}` : `${value > 0 ? "+" : ""}${number(value)}`;

/** All that is known about a token, in words. */
export function describe({ text, logprob, advantage, context }: Token): string {
  const parts = [
    text === "" ? "a part of the next character" : `“${text.replaceAll("\n", "⏎").replaceAll("\t", "⇥")}”`,
    ...(context ? ["not drawn by the model"] : []),
    ...(logprob === null ? [] : [`log-probability ${signed(logprob)} (${percent(Math.exp(logprob))})`]),
    ...(advantage === null ? [] : [`advantage ${signed(advantage)}`]),
  ];
  return parts.join(" · ");
}
