import { useId, useState } from "preact/hooks";
import { asked, begin, type Message, type NewLesson, type RuleKind, textOf, withText } from "../../api/lessons";
import { Action } from "../../components/action";
import { Card } from "../../components/card";
import { Earlier } from "./earlier";
import { EXAMPLES, kindOf, RULES } from "./examples";

const MOST_PROMPTS = 16;

interface Properties {
  /** The lesson to begin again; null: the first example. */
  from: NewLesson | null;
  onBegun: () => Promise<void>;
}

/** Prompts and a rule, and a button that starts. */
export function NewLessonForm({ from, onBegun }: Properties) {
  const [lesson, setLesson] = useState(from ?? EXAMPLES[0].lesson);
  const change = (changes: Partial<NewLesson>) => setLesson({ ...lesson, ...changes });
  const start = async () => {
    await begin({ ...lesson, prompts: lesson.prompts.filter((prompt) => textOf(prompt).trim()) });
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
          <button key={example.title} type="button" onClick={() => setLesson(example.lesson)}>
            {example.title}
          </button>
        ))}
      </p>
      <div class="cards">
        <Prompts prompts={lesson.prompts} onChange={(prompts) => change({ prompts })} />
        <Card title="Rule for the reward">
          <RuleFields lesson={lesson} onChange={change} />
          <More lesson={lesson} onChange={change} />
          <p class="buttons primary">
            <Action needs="train" run={start}>
              Start
            </Action>
          </p>
        </Card>
      </div>
    </>
  );
}

interface PromptsProperties {
  prompts: readonly (readonly Message[])[];
  onChange: (prompts: readonly (readonly Message[])[]) => void;
}

function Prompts({ prompts, onChange }: PromptsProperties) {
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

function RuleFields({ lesson, onChange }: FieldProperties) {
  const id = useId();
  const kind = kindOf(lesson.reward);
  const text = lesson.reward[kind] ?? "";
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
          value={text}
          aria-describedby={`${id}-about`}
          onInput={(event) => onChange({ reward: { [kind]: event.currentTarget.value } })}
        />
        <small id={`${id}-about`}>{RULES[kind].about}</small>
      </p>
    </>
  );
}

/** What rarely needs a change. */
function More({ lesson, onChange }: FieldProperties) {
  const id = useId();
  return (
    <details>
      <summary>More</summary>
      <p class="field">
        <label for={`${id}-adapter`}>Adapter that learns</label>
        <input
          id={`${id}-adapter`}
          placeholder="the default adapter"
          value={lesson.lora_adapter ?? ""}
          onInput={(event) => onChange({ lora_adapter: event.currentTarget.value || undefined })}
        />
      </p>
      <p class="field">
        <label for={`${id}-tokens`}>Longest answer, in tokens</label>
        <input
          id={`${id}-tokens`}
          type="number"
          min={1}
          max={512}
          value={lesson.max_tokens}
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
