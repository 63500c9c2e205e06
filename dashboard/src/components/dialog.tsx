import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";

interface Properties {
  title: string;
  /** Called when the dialog is closed, with the `value` of the button that was pressed; empty after Escape. */
  onClose: (choice: string) => void;
  /** The text, and a `<p class="buttons">` with the choices. */
  children: ComponentChildren;
}

/** A modal dialog while it is rendered. The browser keeps the focus inside, and gives it back afterwards. */
export function Dialog({ title, onClose, children }: Properties) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} aria-labelledby={id} onClose={(event) => onClose(event.currentTarget.returnValue)}>
      <h2 id={id}>{title}</h2>
      <form method="dialog">{children}</form>
    </dialog>
  );
}
