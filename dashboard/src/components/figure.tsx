import type { ComponentChildren } from "preact";

interface Properties {
  label: string;
  value: string;
  /** What the value is of, or what goes with it. */
  children?: ComponentChildren;
}

/** One large number with its name. Put several into a `<dl class="figures">`. */
export const Figure = ({ label, value, children }: Properties) => (
  <div class="figure">
    <dt>{label}</dt>
    <dd>
      <strong>{value}</strong>
      {children && <small>{children}</small>}
    </dd>
  </div>
);
