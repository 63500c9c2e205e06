import { useId, useState } from "preact/hooks";
import { ApiError } from "../../api/client";
import { asked, begin, type Message, type NewLesson, type RuleKind, textOf, withText } from "../../api/lessons";
import { Action } from "../../components/action";
import { Card } from "../../components/card";
import { inWords, LABELS } from "../../components/fields";
import { now } from "../../live/stats";
import { Earlier } from "./earlier";
import { EXAMPLES, kindOf, RULES, ruleOf } from "./examples";

const MOST_PROMPTS = 16;
/** Fields that do not say themselves what the server has against them. */
const OTHER_FIELDS = /^(?!prompts|reward)/;

interface Properties {
  /** What the form begins with. */
  from: NewLesson;
  onBegun: () => Promise<void>;
}

/** Prompts and a rule, and a button that starts. */
export function NewLessonForm({ from, onBegun }: Properties) {
  const [lesson, setLesson] = useState(from);
  const [refused, setRefused] = useState<ApiError | null>(null);
  const write = (written: NewLesson) => {
    setLesson(written);
    setRefused(null);
  };
  const change = (changes: Partial<NewLesson>) => write({ ...lesson, ...changes });
  const prompts = lesson.prompts.filter((prompt) => textOf(prompt).trim());
  const start = async () => {
    try {
      await begin({ ...lesson, prompts });
    } catch (error) {
      if (!(error instanceof ApiError && error.param)) {
        throw error;
      }
      setRefused(error);
      return;
    }
    await onBegun();
  };
  return (
    <>
      <p class="lead">
        Write some prompts and a rule. The server answers each prompt many times, rewards the answers by the rule, and
        makes those with a reward likelier. Requests are served meanwhile.
      </p>
      <p class="examples">
        Try one:{" "}
        {EXAMPLES.map((example) => (
          <button key={example.title} type="button" onClick={() => write(example.lesson)}>
            {example.title}
          </button>
        ))}
      </p>
      <div class="cards">
        <Prompts prompts={lesson.prompts} refused={refused} onChange={(prompts) => change({ prompts })} />
        <Card title="Rule for the reward">
          <RuleFields lesson={lesson} refused={refused} onChange={change} />
          <Learner lesson={lesson} onChange={change} />
          <More lesson={lesson} onChange={change} />
          <Refusal refused={refused} of={OTHER_FIELDS} />
          <p class="buttons primary">
            <Action needs="train" run={start} disabled={prompts.length === 0 || !ruleOf(lesson.reward).trim()}>
              Start
            </Action>
          </p>
        </Card>
      </div>
    </>
  );
}

/** What the server says against a field, beside it. */
const Refusal = ({ refused, of }: { refused: ApiError | null; of: RegExp }) =>
  refused && of.test(refused.param) ? (
    <p class="refusal" role="alert">
      {inWords(refused.message)}
    </p>
  ) : null;

interface PromptsProperties {
  prompts: readonly (readonly Message[])[];
  refused: ApiError | null;
  onChange: (prompts: readonly (readonly Message[])[]) => void;
}

function Prompts({ prompts, refused, onChange }: PromptsProperties) {
  const id = useId();
  return (
    <Card title="Prompts" about="what people ask">
      {prompts.map((prompt, order) => (
        <div key={order} class="field">
          <label for={`${id}-${order}`}>Prompt {order + 1}</label>
          <Earlier messages={prompt} />
          <textarea
            id={`${id}-${order}`}
            rows={2}
            maxLength={4000}
            value={textOf(prompt)}
            onInput={(event) => onChange(prompts.with(order, withText(prompt, event.currentTarget.value)))}
          />
        </div>
      ))}
      <Refusal refused={refused} of={/^prompts/} />
      <p class="buttons">
        {prompts.length > 1 && (
          <button type="button" onClick={() => onChange(prompts.slice(0, -1))}>
            Remove the last
          </button>
        )}
        {prompts.length < MOST_PROMPTS && (
          <button type="button" onClick={() => onChange([...prompts, asked("")])}>
            Add a prompt
          </button>
        )}
      </p>
    </Card>
  );
}

interface FieldProperties {
  lesson: NewLesson;
  onChange: (changes: Partial<NewLesson>) => void;
}

function RuleFields({ lesson, refused, onChange }: FieldProperties & Pick<PromptsProperties, "refused">) {
  const id = useId();
  const kind = kindOf(lesson.reward);
  return (
    <>
      <fieldset class="choices">
        <legend class="hidden">Kind of rule</legend>
        {Object.entries(RULES).map(([each, { title }]) => (
          <label key={each}>
            <input
              type="radio"
              name={id}
              checked={each === kind}
              onChange={() => onChange({ reward: { [each as RuleKind]: "" } })}
            />
            {title}
          </label>
        ))}
      </fieldset>
      <p class="field">
        <label for={`${id}-text`}>{RULES[kind].label}</label>
        <input
          id={`${id}-text`}
          class={kind === "pattern" ? "code" : ""}
          maxLength={500}
          value={ruleOf(lesson.reward)}
          aria-describedby={`${id}-about`}
          onInput={(event) => onChange({ reward: { [kind]: event.currentTarget.value } })}
        />
        <small id={`${id}-about`}>{RULES[kind].about}</small>
      </p>
      <Refusal refused={refused} of={/^reward/} />
    </>
  );
}

/** Who learns, which everybody sees who names that adapter. */
function Learner({ lesson, onChange }: FieldProperties) {
  const id = useId();
  const usual = now.value?.training?.adapters[0]?.name ?? "default";
  return (
    <p class="field">
      <label for={id}>{LABELS.lora_adapter}</label>
      <input
        id={id}
        placeholder={usual}
        value={lesson.lora_adapter ?? ""}
        aria-describedby={`${id}-about`}
        onInput={(event) => onChange({ lora_adapter: event.currentTarget.value || undefined })}
      />
      <small id={`${id}-about`}>
        Each update is live at once, for everybody who asks {lesson.lora_adapter ?? usual}. A new name makes a new
        adapter.
      </small>
    </p>
  );
}

/** What rarely needs a change. */
function More({ lesson, onChange }: FieldProperties) {
  const id = useId();
  return (
    <details>
      <summary>More</summary>
      <p class="field">
        <label for={`${id}-tokens`}>{LABELS.max_tokens}</label>
        <input
          id={`${id}-tokens`}
          type="number"
          min={1}
          max={512}
          value={lesson.max_tokens ?? ""}
          onInput={(event) => onChange({ max_tokens: event.currentTarget.valueAsNumber })}
        />
      </p>
      {lesson.temperature !== undefined && (
        <p class="about">
          As in the lesson before: {lesson.group_size} answers to each prompt, temperature {lesson.temperature},
          learning rate {lesson.learning_rate}.
        </p>
      )}
    </details>
  );
}
