import type { ComponentChildren } from "preact";
import { useId, useRef } from "preact/hooks";

interface Properties {
  /** What the tabs are about, for screen readers. */
  label: string;
  names: readonly string[];
  selected: string;
  onSelect: (name: string) => void;
  /** What the selected tab shows. */
  children: ComponentChildren;
}

/** Tabs as in https://www.w3.org/WAI/ARIA/apg/patterns/tabs: arrow keys move between them. */
export function Tabs({ label, names, selected, onSelect, children }: Properties) {
  const id = useId();
  const list = useRef<HTMLDivElement>(null);
  const move = (event: KeyboardEvent) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      const next = (names.indexOf(selected) + step + names.length) % names.length;
      onSelect(names[next] as string);
      list.current?.querySelectorAll("button")[next]?.focus();
    }
  };
  return (
    <>
      <div class="tabs" role="tablist" aria-label={label} ref={list} onKeyDown={move}>
        {names.map((name) => (
          <button
            key={name}
            type="button"
            role="tab"
            id={`${id}-${name}`}
            aria-selected={name === selected}
            aria-controls={name === selected ? `${id}-panel` : undefined}
            tabIndex={name === selected ? 0 : -1}
            onClick={() => onSelect(name)}
          >
            {name}
          </button>
        ))}
      </div>
      <div role="tabpanel" id={`${id}-panel`} aria-labelledby={`${id}-${selected}`}>
        {children}
      </div>
    </>
  );
}
