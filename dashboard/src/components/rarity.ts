/** Tints by probability: the rarer a token was, the stronger. */

/** Probabilities below which a token is tinted, and each time more strongly. */
export const RARE = [0.9, 0.5, 0.1, 0.01] as const;

/** The look of a token in components.css. */
export function rarity(probability: number): string {
  const step = RARE.filter((bound) => probability < bound).length;
  return step > 0 ? `rare-${step}` : "";
}
