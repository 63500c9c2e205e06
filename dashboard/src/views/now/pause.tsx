import { useState } from "preact/hooks";
import { pause, resume } from "../../api/control";
import type { Stats } from "../../api/stats";
import { Action, Needs } from "../../components/action";
import { Dialog } from "../../components/dialog";
import { failed, toast } from "../../components/toast";

/** Stops generation for everybody, or continues it. */
export function Pause({ state }: Pick<Stats, "state">) {
  const [asking, setAsking] = useState(false);
  const paused = state === "paused";
  const close = (choice: string) => {
    setAsking(false);
    if (choice === "pause") {
      pause().then(() => toast("Paused. Requests wait until somebody resumes."), failed);
    }
  };
  return (
    <>
      <Action needs="admin" run={() => (paused ? resume() : void setAsking(true))}>
        {paused ? "Resume" : "Pause…"}
      </Action>
      <Needs needed="admin" what="Pauses" />
      {asking && (
        <Dialog title="Pause the server?" onClose={close}>
          <p>Requests under way stop where they are, and new ones wait, until somebody resumes. Training continues.</p>
          <p class="buttons">
            <button type="submit">Cancel</button>
            <button type="submit" class="strong" value="pause">
              Pause
            </button>
          </p>
        </Dialog>
      )}
    </>
  );
}
