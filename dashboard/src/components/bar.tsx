/** One bar of several parts, with a legend that has their figures. */

export interface Part {
  label: string;
  value: number;
  /** The name of a colour in base.css, such as `decode`. */
  color: string;
}

interface Properties {
  /** What the bar shows, for screen readers. */
  title: string;
  parts: readonly Part[];
  format: (value: number) => string;
}

export function Bar({ title, parts, format }: Properties) {
  const whole = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  return (
    <>
      <div class="bar" role="img" aria-label={`${title}: ${parts.map((part) => spoken(part, format)).join(", ")}`}>
        {parts
          .filter(({ value }) => value > 0)
          .map((part) => (
            <span key={part.label} class={`fill-${part.color}`} style={{ width: `${(100 * part.value) / whole}%` }} />
          ))}
      </div>
      <Legend parts={parts} format={format} />
    </>
  );
}

const spoken = (part: Part, format: Properties["format"]): string => `${part.label} ${format(part.value)}`;

export const Legend = ({ parts, format }: Omit<Properties, "title">) => (
  <ul class="legend">
    {parts.map((part) => (
      <li key={part.label}>
        <span class={`key fill-${part.color}`} />
        {part.label} <b>{format(part.value)}</b>
      </li>
    ))}
  </ul>
);
