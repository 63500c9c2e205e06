/** The colours of base.css for what is drawn on a canvas, which cannot use them by name. */

import { signal } from "@preact/signals";

const dark = matchMedia("(prefers-color-scheme: dark)");

/** Changes when the colours do, so that charts are drawn again. */
export const scheme = signal(dark.matches ? "dark" : "light");

dark.addEventListener("change", () => {
  scheme.value = dark.matches ? "dark" : "light";
});

/** The value of the custom property `--NAME`. */
export const color = (name: string): string =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
