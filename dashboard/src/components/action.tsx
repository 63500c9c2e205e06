import type { ComponentChildren } from "preact";
import { useId, useState } from "preact/hooks";
import type { Role } from "../api/stats";
import { now } from "../live/stats";
import { failed, succeeded } from "./toast";

interface Properties {
  /** The role that the server asks for; see its table of routes. */
  needs: Role;
  /** What the button does; it is off until the promise, if there is one, is settled. Errors are shown in their words. */
  run: () => Promise<unknown> | undefined;
  /** Of a button that stays pressed, whether it is. */
  pressed?: boolean;
  /** Off until something else is given, such as a text. */
  disabled?: boolean;
  /** It takes something away. */
  danger?: boolean;
  children: ComponentChildren;
}

const ROLES: readonly Role[] = ["inference", "train", "admin"];

/** Whether the key that opened the page may do what needs this role. */
export const may = (needs: Role): boolean =>
  ROLES.indexOf(now.value?.caller.role ?? "inference") >= ROLES.indexOf(needs);

/** A button for something that needs a role. Without the role it does nothing; `Needs` says why, once for all buttons. */
export function Action({ needs, run, pressed, disabled = false, danger = false, children }: Properties) {
  const [busy, setBusy] = useState(false);
  const id = useId();
  const allowed = may(needs);
  const act = () => {
    const running = run();
    if (running) {
      setBusy(true);
      void running.then(succeeded, failed).finally(() => setBusy(false));
    }
  };
  return (
    <span class="action">
      <button
        type="button"
        class={danger ? "danger" : ""}
        disabled={busy || disabled || !allowed}
        title={allowed ? undefined : reason(needs)}
        aria-describedby={allowed ? undefined : id}
        aria-pressed={pressed}
        onClick={act}
      >
        {children}
      </button>
      {allowed ? null : (
        <small id={id} class="hidden">
          {reason(needs)}
        </small>
      )}
    </span>
  );
}

const reason = (needs: Role): string => `needs a key with the role ${needs}; yours is ${now.value?.caller.role}`;

/** Why buttons are off, if they are. `what` begins the sentence: "Changes". */
export const Needs = ({ needed, what }: { needed: Role; what: string }) =>
  may(needed) ? null : (
    <p class="about needs">
      {what} {reason(needed).replace("needs", "need")}.
    </p>
  );
