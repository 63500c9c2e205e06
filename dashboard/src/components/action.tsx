import type { ComponentChildren } from "preact";
import { useId, useState } from "preact/hooks";
import type { Role } from "../api/stats";
import { now } from "../live/stats";
import { failed } from "./toast";

interface Properties {
  /** The role that the server asks for; see its table of routes. */
  needs: Role;
  /** What the button does; it is off until the promise, if there is one, is settled. Errors are shown in their words. */
  run: () => Promise<unknown> | undefined;
  /** Of a button that stays pressed, whether it is. */
  pressed?: boolean;
  children: ComponentChildren;
}

const ROLES: readonly Role[] = ["inference", "train", "admin"];

/** Whether the key that opened the page may do what needs this role. */
export const may = (needs: Role): boolean =>
  ROLES.indexOf(now.value?.caller.role ?? "inference") >= ROLES.indexOf(needs);

/** A button for something that needs a role. Without the role it says so, and does nothing. */
export function Action({ needs, run, pressed, children }: Properties) {
  const [busy, setBusy] = useState(false);
  const id = useId();
  const allowed = may(needs);
  const act = () => {
    const running = run();
    if (running) {
      setBusy(true);
      void running.catch(failed).finally(() => setBusy(false));
    }
  };
  return (
    <span class="action">
      <button
        type="button"
        disabled={busy || !allowed}
        aria-describedby={allowed ? undefined : id}
        aria-pressed={pressed}
        onClick={act}
      >
        {children}
      </button>
      {allowed ? null : (
        <small id={id}>
          needs a key with the role {needs}; yours is {now.value?.caller.role}
        </small>
      )}
    </span>
  );
}
