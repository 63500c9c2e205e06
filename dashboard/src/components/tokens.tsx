/** Text in pieces, such as the tokens of an answer, each with a look and with something to say about it. */

import type { ComponentChildren } from "preact";
import { useMemo, useRef, useState } from "preact/hooks";

export interface Piece {
  text: string;
  /** The names of its looks in components.css, such as a tint; `sign`: it stands for something without a text. */
  look: string;
}

interface Properties {
  /** What the text is, for screen readers. */
  label: string;
  pieces: readonly Piece[];
  /** What is shown about a piece, by its place, while the pointer or the focus is on it. */
  about: (place: number) => ComponentChildren;
}

interface Shown {
  place: number;
  /** Pixels from the corner of the text. */
  left: number;
  top: number;
}

/** The width of what is said about a piece, as in components.css, in pixels. */
const ABOUT_WIDTH = 240;

/** Tab reaches one piece, and arrow keys move on from it. What is said about it is a live region, and Escape hides it. */
export function Tokens({ label, pieces, about }: Properties) {
  const text = useRef<HTMLDivElement>(null);
  const [reached, setReached] = useState(0);
  const [shown, setShown] = useState<Shown | null>(null);
  const spans = useMemo(
    () => pieces.map((piece, place) => <Span key={place} piece={piece} place={place} reached={place === reached} />),
    [pieces, reached],
  );
  const point = ({ target }: Event) => {
    const piece = pieceAt(target);
    if (piece && text.current) {
      setShown(shownBelow(piece, text.current));
    }
    return piece;
  };
  const focus = (event: Event) => {
    const piece = point(event);
    if (piece) {
      setReached(placeOf(piece));
    }
  };
  const move = (event: KeyboardEvent) => {
    const to = destination(event.key, reached, pieces.length);
    if (to !== null) {
      event.preventDefault();
      text.current?.querySelector<HTMLElement>(`[data-place="${to}"]`)?.focus();
    } else if (event.key === "Escape") {
      setShown(null);
    }
  };
  return (
    // biome-ignore lint/a11y/useSemanticElements: a fieldset is for the fields of a form.
    <div
      ref={text}
      class="tokens"
      role="group"
      aria-label={label}
      onPointerOver={(event) => void point(event)}
      onPointerLeave={() => setShown(null)}
      onFocusIn={focus}
      onFocusOut={() => setShown(null)}
      onKeyDown={move}
    >
      {spans}
      <div class="about-token" role="status" style={shown ? { left: `${shown.left}px`, top: `${shown.top}px` } : {}}>
        {shown && about(shown.place)}
      </div>
    </div>
  );
}

const Span = ({ piece, place, reached }: { piece: Piece; place: number; reached: boolean }) => (
  <span class={`token ${piece.look}`} data-place={place} tabIndex={reached ? 0 : -1}>
    {piece.text}
  </span>
);

const pieceAt = (target: EventTarget | null): HTMLElement | null =>
  target instanceof Element ? target.closest<HTMLElement>("[data-place]") : null;

const placeOf = (piece: HTMLElement): number => Number(piece.dataset.place);

function shownBelow(piece: HTMLElement, text: HTMLElement): Shown {
  const line = [...piece.getClientRects()].at(-1) ?? piece.getBoundingClientRect();
  const corner = text.getBoundingClientRect();
  const left = Math.max(0, Math.min(line.left - corner.left, corner.width - ABOUT_WIDTH));
  return { place: placeOf(piece), left, top: line.bottom - corner.top };
}

function destination(key: string, from: number, count: number): number | null {
  const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: count - 1 }[key];
  return to !== undefined && to >= 0 && to < count ? to : null;
}
