import { type Answer, type Lesson, type Prompt, textOf } from "../../api/lessons";
import { Card } from "../../components/card";
import { percent } from "../../format";
import { Earlier } from "./earlier";

const SHOWN = 3;

/** Answers to each prompt, the first ones beside the newest. */
export const Answers = ({ lesson }: { lesson: Lesson }) => (
  <div class="stack">
    {lesson.prompts.map((prompt, order) => (
      <PromptCard key={order} prompt={prompt} />
    ))}
  </div>
);

const PromptCard = ({ prompt }: { prompt: Prompt }) => (
  <Card title={textOf(prompt.messages)}>
    <Earlier messages={prompt.messages} />
    <div class="sides">
      <Side title="Before" answers={prompt.before} />
      <Side title="Now" answers={prompt.now} />
    </div>
  </Card>
);

function Side({ title, answers }: { title: string; answers: Answer[] }) {
  const mean = answers.reduce((sum, answer) => sum + answer.reward, 0) / answers.length;
  return (
    <section>
      <h3>
        {title} <small>{answers.length ? `${percent(mean)} of the reward` : "no answers yet"}</small>
      </h3>
      <ul class="answers">
        {answers.slice(0, SHOWN).map((answer, order) => (
          <li key={order} class={answer.reward > 0.5 ? "rewarded" : ""}>
            <span class="mark" title={`reward ${answer.reward}`}>
              {answer.reward > 0.5 ? "✓" : "✗"}
              <span class="hidden">reward {answer.reward}</span>
            </span>
            <span>{answer.text || "(empty)"}</span>
          </li>
        ))}
      </ul>
    </section>
  );
}
