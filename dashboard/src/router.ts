/** The view that the address names, after `#/`: `#/now`, or `#/adapters/tone` with the rest for the view to read. */

import { signal } from "@preact/signals";

export interface Place {
  view: string;
  rest: readonly string[];
}

const placeOf = (hash: string): Place => {
  const [view = "", ...rest] = hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  return { view, rest };
};

export const place = signal<Place>(placeOf(location.hash));

addEventListener("hashchange", () => {
  place.value = placeOf(location.hash);
});

/** The address of a view. */
export const link = (view: string, ...rest: string[]): string =>
  `#/${[view, ...rest].map(encodeURIComponent).join("/")}`;
