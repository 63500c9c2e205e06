import { useState } from "preact/hooks";
import { type Schedule, schedule, setSchedule } from "../../api/learning";
import { Action, Needs } from "../../components/action";
import { Dialog } from "../../components/dialog";
import { failed, toast } from "../../components/toast";
import { percent } from "../../format";

/** How much of the device's time updates get beside requests. */
export function Share() {
  const [current, setCurrent] = useState<Schedule | null>(null);
  const ask = () => schedule().then(setCurrent);
  return (
    <>
      <Action needs="admin" run={ask}>
        Time for training…
      </Action>
      <Needs needed="admin" what="Changes of the time for training" />
      {current && <Choice current={current} onClose={() => setCurrent(null)} />}
    </>
  );
}

function Choice({ current, onClose }: { current: Schedule; onClose: () => void }) {
  const [share, setShare] = useState(Math.round(100 * current.training_time_share));
  const close = (choice: string) => {
    onClose();
    if (choice === "set") {
      setSchedule(share / 100).then(
        (changed) =>
          toast(`Training gets ${percent(changed.training_time_share)} of the device's time beside requests.`),
        failed,
      );
    }
  };
  return (
    <Dialog title="Time for training" onClose={close}>
      <p>
        <label class="entry">
          Share of the device's time while requests run: <b>{share} %</b>
          <input
            type="range"
            min={1}
            max={100}
            value={share}
            onInput={(event) => setShare(Number(event.currentTarget.value))}
          />
        </label>
      </p>
      <p>
        Training also gets all time that requests leave. A larger share makes learning faster and answers slower while
        requests run. It got {percent(current.measured.training_share)} lately. A restart restores the configured share.
      </p>
      <p class="buttons">
        <button type="submit">Cancel</button>
        <button type="submit" class="strong" value="set">
          Set the share
        </button>
      </p>
    </Dialog>
  );
}
