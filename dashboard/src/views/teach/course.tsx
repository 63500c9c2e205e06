/** A lesson that runs, or has run: its curve, its answers, and what can be done with it. */

import { useState } from "preact/hooks";
import { keep, type Lesson, type NewLesson, stop, undo } from "../../api/lessons";
import { Action } from "../../components/action";
import { Card } from "../../components/card";
import { Chart, SHARES } from "../../components/chart";
import { Dialog } from "../../components/dialog";
import { Figure } from "../../components/figure";
import { failed, toast } from "../../components/toast";
import { duration, percent } from "../../format";
import { Answers } from "./answers";
import { kindOf, RULES } from "./examples";
import { Try } from "./try";
import { sentence } from "./words";

interface Properties {
  lesson: Lesson;
  /** Asks the server for the lesson again. */
  refresh: () => Promise<void>;
  /** Opens the form: empty, or with this lesson. */
  onNew: (from: NewLesson | "new") => void;
  /** Whether the server takes another lesson. */
  canStart: boolean;
}

export function Course({ lesson, refresh, onNew, canStart }: Properties) {
  return (
    <>
      <p class="lead" role="status">
        {sentence(lesson)}
      </p>
      {lesson.advice && <p class="advice">{lesson.advice}</p>}
      <Figures lesson={lesson} />
      <div class="cards">
        <Curve lesson={lesson} />
        <Card title="The lesson">
          <Rule lesson={lesson} />
          <Choices {...{ lesson, refresh, onNew, canStart }} />
        </Card>
      </div>
      <Answers lesson={lesson} />
      {lesson.updates > 0 && <Try lesson={lesson} />}
    </>
  );
}

function Figures({ lesson }: { lesson: Lesson }) {
  const { points, updates, most_updates, lora_adapter, live_lora, showing } = lesson;
  const first = points[0];
  const last = whole(lesson).at(-1);
  const until = lesson.ended ? Date.parse(lesson.ended) : Date.now();
  return (
    <dl class="figures">
      <Figure label="Reward now" value={last && !showing ? percent(last.reward) : "–"}>
        {first
          ? `${percent(first.reward)} at first${showing ? "; measured again after the examples" : ""}`
          : "no answers yet"}
      </Figure>
      <Figure label="Updates" value={`${updates}`}>
        {most_updates ? `of ${most_updates}, ` : ""}
        {lesson.answers_per_update} answers each
      </Figure>
      <Figure label="Time" value={duration(Math.max(1, Math.round((until - Date.parse(lesson.started)) / 1000)))}>
        since the start
      </Figure>
      <Figure label="Adapter" value={lora_adapter}>
        {live_lora ? `live: ${live_lora}` : "the base model still answers"}
      </Figure>
    </dl>
  );
}

/** The points that all answers of an update have made; the first one is shown early. */
const whole = ({ points, answers_per_update }: Lesson) =>
  points.filter((point, order) => order === 0 || point.answers >= answers_per_update);

function Curve({ lesson }: { lesson: Lesson }) {
  const points = whole(lesson);
  return (
    <Card title="Reward" about="mean of the answers, with its 95 % interval, over updates">
      <Chart
        title="Mean reward over the updates of the lesson"
        x={points.map((point) => point.update)}
        xLabel="Update"
        lines={[
          { label: "Mean", color: "decode", values: points.map((point) => point.reward) },
          { label: "Low", color: "quiet", faint: true, values: points.map((point) => point.low) },
          { label: "High", color: "quiet", faint: true, values: points.map((point) => point.high) },
        ]}
        between={[1, 2]}
        format={percent}
        marks={SHARES}
        height={220}
      />
    </Card>
  );
}

function Rule({ lesson: { reward } }: { lesson: Lesson }) {
  const kind = kindOf(reward);
  return (
    <p>
      {RULES[kind].title}: {kind === "judge" ? reward[kind] : <code>{reward[kind]}</code>}
    </p>
  );
}

function Choices({ lesson, refresh, onNew, canStart }: Properties) {
  const [undoing, setUndoing] = useState(false);
  const stopNow = async () => {
    await stop();
    await refresh();
  };
  const keepNow = async () => {
    await keep(lesson);
    toast(`Saved with the tag ${lesson.id}. A restart continues from it.`);
  };
  const undoNow = async () => {
    await undo(lesson);
    toast(`${lesson.lora_adapter} is as it was before the lesson.`);
    await refresh();
  };
  const close = (choice: string) => {
    setUndoing(false);
    if (choice === "undo") {
      undoNow().catch(failed);
    }
  };
  if (lesson.state !== "ended") {
    return (
      <p class="buttons left">
        <Action needs="train" run={stopNow}>
          Stop
        </Action>
      </p>
    );
  }
  return (
    <>
      {lesson.updates > 0 && <p class="about">{ABOUT}</p>}
      <p class="buttons left">
        {lesson.updates > 0 && (
          <Action needs="train" run={keepNow}>
            Keep
          </Action>
        )}
        {lesson.updates > 0 && (
          <Action needs="train" run={() => void setUndoing(true)}>
            Start over…
          </Action>
        )}
        {canStart && (
          <button type="button" onClick={() => onNew(asNew(lesson))}>
            Go on
          </button>
        )}
        {canStart && (
          <button type="button" onClick={() => onNew("new")}>
            New lesson
          </button>
        )}
      </p>
      {undoing && (
        <Dialog title="Undo this lesson?" onClose={close}>
          <p>{lesson.lora_adapter} is served again as it was before, and training continues from there.</p>
          <p class="buttons">
            <button type="submit">Cancel</button>
            <button type="submit" class="strong" value="undo">
              Undo
            </button>
          </p>
        </Dialog>
      )}
    </>
  );
}

const ABOUT =
  "The adapter stays live. Keep saves it with a tag; Start over takes back what it has learnt; Go on opens the form with the same prompts.";

/** The same lesson once more, but for its number of updates, which were made. */
const asNew = (lesson: Lesson): NewLesson => ({
  prompts: lesson.prompts.map((prompt) => prompt.messages),
  reward: lesson.reward,
  max_tokens: lesson.max_tokens,
  group_size: lesson.group_size,
  temperature: lesson.temperature,
  learning_rate: lesson.learning_rate,
  lora_adapter: lesson.lora_adapter,
});
