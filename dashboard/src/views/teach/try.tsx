import { useId, useState } from "preact/hooks";
import { ask, type Lesson } from "../../api/lessons";
import { Action } from "../../components/action";
import { Card } from "../../components/card";

const BASE = "base";

/** Asks the base model and the adapter the same thing. */
export function Try({ lesson }: { lesson: Lesson }) {
  const id = useId();
  const [text, setText] = useState(lesson.prompts[0]?.messages.at(-1)?.content ?? "");
  const [answers, setAnswers] = useState<readonly [string, string] | null>(null);
  const run = async () => {
    const models = [BASE, lesson.lora_adapter];
    const [base = "", adapter = ""] = await Promise.all(models.map((model) => ask(model, text, lesson.max_tokens)));
    setAnswers([base, adapter]);
  };
  return (
    <Card title="Try it" about="with a prompt that was not in the lesson, too">
      <p class="field">
        <label for={id}>Prompt</label>
        <textarea id={id} rows={2} value={text} onInput={(event) => setText(event.currentTarget.value)} />
      </p>
      <Action needs="inference" run={run}>
        Ask both
      </Action>
      {answers && (
        <div class="sides" role="status">
          {(["Base model", lesson.lora_adapter] as const).map((name, order) => (
            <section key={name}>
              <h3>{name}</h3>
              <p class="answer">{answers[order]}</p>
            </section>
          ))}
        </div>
      )}
    </Card>
  );
}
