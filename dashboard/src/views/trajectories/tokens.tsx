import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Token } from "../../api/trajectories";
import { describe, lookOf, type Tint } from "./tint";

interface Properties {
  /** Whose tokens they are, for screen readers. */
  label: string;
  tokens: readonly Token[];
  left_out: number;
  tint: Tint;
  largest: number;
}

/**
 * The text of an answer, token by token. Its line below has the figures of the token under the pointer or, with the
 * keyboard, of the one that the arrow keys have reached.
 */
export function Tokens({ label, tokens, left_out, tint, largest }: Properties) {
  const [at, setAt] = useState<number | null>(null);
  const text = useRef<HTMLElement>(null);
  // The elements are made once for each change of the tint: an answer may have thousands.
  const shown = useMemo(
    () =>
      tokens.map((token, order) => (
        <span key={order} class={`token ${lookOf(token, tint, largest)}`}>
          {token.text}
        </span>
      )),
    [tokens, tint, largest],
  );
  useEffect(() => {
    const element = at === null ? null : text.current?.children[at];
    element?.classList.add("at");
    return () => element?.classList.remove("at");
  }, [at, shown]);
  const point = (event: PointerEvent) => {
    const place = [...(text.current?.children ?? [])].indexOf(event.target as Element);
    if (place >= 0) {
      setAt(place);
    }
  };
  const move = (event: KeyboardEvent) => {
    const last = tokens.length - 1;
    const to = { ArrowRight: (at ?? -1) + 1, ArrowLeft: (at ?? 1) - 1, Home: 0, End: last }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      setAt(Math.min(Math.max(to, 0), last));
    }
  };
  const token = at === null ? undefined : tokens[at];
  return (
    <>
      <section
        ref={text}
        class="tokens"
        aria-label={label}
        // biome-ignore lint/a11y/noNoninteractiveTabindex: whoever uses the keyboard must reach the tokens.
        tabIndex={0}
        onPointerOver={point}
        onKeyDown={move}
      >
        {shown}
      </section>
      <p class="readout" role="status">
        {token ? describe(token) : left_out > 0 ? `${left_out} more tokens are not shown.` : ""}
      </p>
    </>
  );
}
