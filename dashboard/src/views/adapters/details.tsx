import { useState } from "preact/hooks";
import { type AdapterVersion, rollBack, save, setRoute, unload } from "../../api/adapters";
import { rollBackTraining, startTraining, stopTraining } from "../../api/learning";
import { Card } from "../../components/card";
import { Confirmed } from "../../components/confirmed";
import { bytes, counted, date, number } from "../../format";
import { now } from "../../live/stats";
import { link } from "../../router";
import { LearntFrom } from "../why/learnt-from";
import { StartComparison } from "./comparisons";
import type { Overview } from "./overview";
import { WHERE } from "./versions";

interface Properties {
  version: AdapterVersion;
  overview: Overview;
  onDone: () => void;
}

/** One version, and what can be done with it. */
export const Details = (properties: Properties) => {
  const { version } = properties;
  return (
    <Card title={version.id} about={version.live ? `requests that name ${version.name} get it` : "not live"}>
      <dl class="facts">
        <dt>Where</dt>
        <dd>{WHERE[version.residence]}</dd>
        <dt>Folder</dt>
        <dd>{version.root || "none: it was made here"}</dd>
        <dt>Made</dt>
        <dd>{date(version.created)}</dd>
        <dt>Rank and size</dt>
        <dd>
          {number(version.rank)}, {bytes(version.bytes)}
        </dd>
        <dt>Checkpoint</dt>
        <dd>{version.checkpoint ?? "none"}</dd>
      </dl>
      <div class="controls">
        <Publish {...properties} />
        <Serve {...properties} />
        <Save {...properties} />
        <Train {...properties} />
        <StartComparison {...properties} />
        <Unload {...properties} />
        <a href={link("playground", "base", version.live ? version.name : version.id)}>Chat with it</a>
      </div>
      {now.value?.training && <LearntFrom version={version.id} />}
    </Card>
  );
};

/** Makes the version live. One that is trained is live by a rollback of its training, any other by its route. */
function Publish({ version, overview, onDone }: Properties) {
  const { id, name, live, checkpoint } = version;
  const trained = overview.trained.includes(name);
  if (trained && !live && checkpoint) {
    return (
      <Confirmed
        needs="train"
        label="Make it live"
        title={`Make ${id} live?`}
        run={() => rollBackTraining(name, checkpoint).then(onDone)}
        done={`${id} is live.`}
      >
        Requests for {name} get {id} from now on, and its training continues from there. Requests under way end on the
        version that they began with.
      </Confirmed>
    );
  }
  const older = overview.adapters.data.some((other) => other.name === name && other.id !== id);
  return live && older && !trained ? (
    <Confirmed
      needs="train"
      label="Roll back"
      title={`Roll ${name} back?`}
      run={() => rollBack(name).then(onDone)}
      done={`The version of ${name} before ${id} is live.`}
    >
      The version of {name} that was live before {id} is live again. Requests under way end on the version that they
      began with.
    </Confirmed>
  ) : null;
}

const Serve = ({ version: { id, name, live }, onDone }: Properties) => (
  <Confirmed
    needs="train"
    label="Serve by default"
    title={`Serve ${live ? name : id} by default?`}
    run={() => setRoute({ [live ? name : id]: 1 }).then(onDone)}
    done={`Requests that name no adapter get ${id}.`}
  >
    All requests that name no adapter get {id}
    {live ? `, and later versions of ${name} when they go live` : ""}. It is copied into a slot of the bank first. “Undo
    the last change” brings the present shares back.
  </Confirmed>
);

function Save({ version: { id, name, live }, onDone }: Properties) {
  const [tag, setTag] = useState("");
  return (
    <Confirmed
      needs="train"
      label="Save"
      title={`Save ${id} as a checkpoint?`}
      run={() => save(live ? name : id, tag).then(onDone)}
      done={`${id} is saved.`}
    >
      Its weights are written to the folder of the run; if it is in training, with the state of the optimizer.
      <label class="entry">
        A name for it, if it needs one
        <input type="text" value={tag} maxLength={160} onInput={(event) => setTag(event.currentTarget.value)} />
      </label>
    </Confirmed>
  );
}

function Train({ version: { name, live }, overview, onDone }: Properties) {
  if (!now.value?.training || !live) {
    return null;
  }
  return overview.trained.includes(name) ? (
    <Confirmed
      needs="train"
      label="Stop training"
      title={`Stop the training of ${name}?`}
      run={() => stopTraining(name).then(onDone)}
      done={`${name} is no longer in training.`}
    >
      The update that is being made is finished, what {name} has learnt is saved, and its live version stays live.
      Answers that wait to be learnt from are dropped.
    </Confirmed>
  ) : (
    <Confirmed
      needs="train"
      label="Train it"
      title={`Train ${name}?`}
      run={() => startTraining(name).then(onDone)}
      done={`${name} is in training; the view Learning shows it.`}
    >
      Answers that are collected for {name} make updates, and each update makes a new version that goes live.
    </Confirmed>
  );
}

/** The live version of an adapter in training stays until that is stopped: the server refuses to unload it. */
const Unload = ({ version: { id, name, live, leases }, overview, onDone }: Properties) => (
  <Confirmed
    needs="train"
    label="Unload"
    danger
    disabled={live && overview.trained.includes(name)}
    title={`Unload ${id}?`}
    run={() =>
      unload(id).then(() => {
        location.hash = link("adapters");
        onDone();
      })
    }
    done={`${id} is unloaded.`}
  >
    New requests can no longer name it. Its files stay on the disk.
    {leases > 0 && ` ${counted(leases, "request")} under way will end on it.`}
  </Confirmed>
);
