/** A table that renders only the rows in sight, so that ten thousand rows are listed without a stall. */

import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { number } from "../format";

export interface TableColumn<R> {
  title: string;
  cell: (row: R) => ComponentChildren;
  /** Aligns the column to the right. */
  numeric?: boolean;
}

interface Properties<R> {
  /** What the table lists, for screen readers. */
  caption: string;
  columns: readonly TableColumn<R>[];
  rows: readonly R[];
  /** A name of the row that does not change. */
  keyOf: (row: R) => string;
  /** Makes rows buttons: called with a click or Enter. */
  onOpen?: (row: R) => void;
  /** The row that is open. */
  isOpen?: (row: R) => boolean;
  /** Called when the last rows come near, so that more can be added. */
  onEnd?: () => void;
  /** There are more rows than these, which `onEnd` adds. */
  more?: boolean;
  /** Said in place of an empty table: what to do to get rows. */
  empty: ComponentChildren;
}

const ROW_HEIGHT = 34;
const BEYOND = 10;
/** The largest share of the window that a table takes, and the least pixels of that. */
const SHARE = 0.6;
const LEAST_HEIGHT = 340;

export function Table<R>(properties: Properties<R>) {
  const { caption, columns, rows, keyOf, onOpen, isOpen, onEnd, more = false, empty } = properties;
  const height = Math.max(LEAST_HEIGHT, SHARE * innerHeight);
  const place = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  useLayoutEffect(() => setTop(place.current?.scrollTop ?? 0), [rows.length]);
  const first = Math.max(0, Math.floor(top / ROW_HEIGHT) - BEYOND);
  const last = Math.min(rows.length, Math.ceil((top + height) / ROW_HEIGHT) + BEYOND);
  const atEnd = last === rows.length;
  useEffect(() => {
    if (atEnd) {
      onEnd?.();
    }
  }, [atEnd, rows.length]);
  if (rows.length === 0) {
    return <p class="empty">{empty}</p>;
  }
  const shown = inSight(top, height, rows.length);
  return (
    <>
      <section
        ref={place}
        class="table"
        aria-label={caption}
        style={{ maxHeight: `${height}px` }}
        // biome-ignore lint/a11y/noNoninteractiveTabindex: whoever uses the keyboard must be able to scroll it.
        tabIndex={0}
        onScroll={(event) => setTop(event.currentTarget.scrollTop)}
      >
        <table aria-rowcount={rows.length + 1}>
          <caption class="hidden">{caption}</caption>
          <thead>
            <tr aria-rowindex={1}>
              {columns.map((column) => (
                <th key={column.title} scope="col" class={column.numeric ? "numeric" : ""}>
                  {column.title}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            <Space rows={first} />
            {rows.slice(first, last).map((row, order) => (
              <Row key={keyOf(row)} {...{ row, columns, onOpen, isOpen }} index={first + order + 2} />
            ))}
            <Space rows={rows.length - last} />
          </tbody>
        </table>
      </section>
      {(more || shown.last - shown.first + 1 < rows.length) && (
        <p class="in-sight">
          {number(shown.first)} to {number(shown.last)} of {number(rows.length)}
          {more ? " or more" : ""}; scroll for the others
        </p>
      )}
    </>
  );
}

/** The rows that are seen whole, counted from 1, below the line with the titles. */
export function inSight(top: number, height: number, rows: number): { first: number; last: number } {
  const first = Math.min(Math.ceil(top / ROW_HEIGHT), Math.max(0, rows - 1));
  const last = Math.min(rows, Math.max(first + 1, Math.floor((top + height - ROW_HEIGHT) / ROW_HEIGHT)));
  return { first: first + 1, last };
}

/** The height of rows that are not rendered. */
const Space = ({ rows }: { rows: number }) =>
  // biome-ignore lint/a11y/noAriaHiddenOnFocusable: nothing in it takes the focus.
  rows > 0 ? <tr aria-hidden="true" style={{ height: `${rows * ROW_HEIGHT}px` }} /> : null;

interface RowProperties<R> extends Pick<Properties<R>, "columns" | "onOpen" | "isOpen"> {
  row: R;
  index: number;
}

function Row<R>({ row, columns, onOpen, isOpen, index }: RowProperties<R>) {
  const open = isOpen?.(row) ?? false;
  const cells = columns.map((column, order) => {
    const content = column.cell(row);
    return (
      <td key={column.title} class={column.numeric ? "numeric" : ""}>
        {onOpen && order === 0 ? (
          <button type="button" class="plain" onClick={() => onOpen(row)}>
            {content}
          </button>
        ) : (
          content
        )}
      </td>
    );
  });
  return (
    <tr aria-rowindex={index} aria-current={open || undefined}>
      {cells}
    </tr>
  );
}
