/** What the address names after `#/`: a view, what the view reads of the rest, and choices such as filters:
 * `#/now`, `#/adapters/tone`, `#/trajectories?fate=dropped`. */

import { signal } from "@preact/signals";

export type Query = Readonly<Record<string, string>>;

export interface Place {
  view: string;
  rest: readonly string[];
  query: Query;
}

const placeOf = (hash: string): Place => {
  const [path = "", search] = hash.replace(/^#\/?/, "").split("?", 2);
  const [view = "", ...rest] = path.split("/").map(decodeURIComponent);
  return { view, rest, query: Object.fromEntries(new URLSearchParams(search)) };
};

export const place = signal<Place>(placeOf(location.hash));

addEventListener("hashchange", () => {
  place.value = placeOf(location.hash);
});

/** The address of a view. */
export const link = (view: string, ...rest: string[]): string =>
  `#/${[view, ...rest].map(encodeURIComponent).join("/")}`;

/** The same address with these choices; empty ones are left out. */
export function withQuery(address: string, query: Query): string {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "")).toString();
  return search ? `${address}?${search}` : address;
}
