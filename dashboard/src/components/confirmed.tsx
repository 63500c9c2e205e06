import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Role } from "../api/stats";
import { Action } from "./action";
import { Dialog } from "./dialog";
import { failed, toast } from "./toast";

interface Properties {
  needs: Role;
  /** On the button. */
  label: string;
  /** Of the dialog: what is asked. */
  title: string;
  run: () => Promise<unknown>;
  /** What has happened then, in words. */
  done: string;
  /** It takes something away. */
  danger?: boolean;
  /** There is nothing to be done now. */
  disabled?: boolean;
  /** What the action will do. */
  children: ComponentChildren;
}

/** An action that says what it will do, and asks, before it is done. */
export function Confirmed({ needs, label, title, run, done, danger, disabled, children }: Properties) {
  const [asking, setAsking] = useState(false);
  const close = (choice: string) => {
    setAsking(false);
    if (choice === "yes") {
      run().then(() => toast(done), failed);
    }
  };
  return (
    <>
      <Action {...{ needs, danger, disabled }} run={() => void setAsking(true)}>
        {label}
      </Action>
      {asking && (
        <Dialog title={title} onClose={close}>
          <div>{children}</div>
          <p class="buttons">
            <button type="submit" formNoValidate>
              Cancel
            </button>
            <button type="submit" class={danger ? "strong danger" : "strong"} value="yes">
              {label}
            </button>
          </p>
        </Dialog>
      )}
    </>
  );
}
