import type { ComponentChildren } from "preact";

/** A line across the page about something that is wrong now. Screen readers say it at once. */
export const Banner = ({ children }: { children: ComponentChildren }) => (
  <p class="banner" role="alert">
    {children}
  </p>
);
