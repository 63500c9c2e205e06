import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";

interface Properties {
  title: string;
  /** A few words beside the title, such as the unit. */
  about?: string;
  children: ComponentChildren;
}

/** A titled part of a view. */
export function Card({ title, about, children }: Properties) {
  const id = useId();
  return (
    <section class="card" aria-labelledby={id}>
      <h2 id={id}>
        {title} {about && <small>{about}</small>}
      </h2>
      {children}
    </section>
  );
}
