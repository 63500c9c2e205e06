import { useId, useState } from "preact/hooks";
import { ask, type Lesson, type Message, textOf, withText } from "../../api/lessons";
import { Action } from "../../components/action";
import { Card } from "../../components/card";
import { link } from "../../router";
import { Earlier } from "./earlier";

const BASE = "base";

/** Asks the base model and the adapter the same thing. */
export function Try({ lesson }: { lesson: Lesson }) {
  const id = useId();
  const [messages, setMessages] = useState<readonly Message[]>(lesson.prompts[0]?.messages ?? []);
  const [answers, setAnswers] = useState<readonly [string, string] | null>(null);
  const run = async () => {
    const models = [BASE, lesson.lora_adapter];
    const [base = "", adapter = ""] = await Promise.all(models.map((model) => ask(model, messages, lesson.max_tokens)));
    setAnswers([base, adapter]);
  };
  return (
    <Card title="Try it" about="with a prompt that was not in the lesson, too">
      <Earlier messages={messages} />
      <p class="field">
        <label for={id}>Prompt</label>
        <textarea
          id={id}
          rows={2}
          value={textOf(messages)}
          onInput={(event) => setMessages(withText(messages, event.currentTarget.value))}
        />
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
      <p class="about">
        <a href={link("playground", BASE, lesson.lora_adapter)}>Chat with both</a>
      </p>
    </Card>
  );
}
