/** Chat with one version, or with two side by side on the same prompts and the same seed. */

import { signal } from "@preact/signals";
import { useEffect, useId, useState } from "preact/hooks";
import "../../style/playground.css";
import { now } from "../../live/stats";
import { ask, clear, type Settings, turns, underWay } from "./conversation";
import { Learn, Setup, type Sides } from "./setup";
import { Transcript } from "./transcript";
import { groupsOf, type Known, learns, useKnown } from "./versions";

/** What was chosen stays, like the conversation, while other views are shown. */
const sides = signal<Sides | null>(null);
const settings = signal<Settings>({ system: "", temperature: 0.7, maxTokens: 256, seed: 1 });
const collects = signal(false);

/** `rest`: the versions that the address names, such as a link from the view Adapters. */
export function PlaygroundView({ rest }: { rest: readonly string[] }) {
  const { known, why } = useKnown();
  const [first, second] = rest;
  useEffect(() => {
    if (first) {
      sides.value = { first, second: second ?? "" };
    }
  }, [first, second]);
  if (known === null || now.value === null) {
    return <p class="empty">{why || "Asking the server…"}</p>;
  }
  if (now.value.mode === "training_only") {
    return <p class="empty">This server only trains: it answers no requests.</p>;
  }
  return <Playground known={known} />;
}

function Playground({ known }: { known: Known }) {
  const groups = groupsOf(known);
  const chosen = sides.value ?? suggested(known);
  const names = [chosen.first, chosen.second].filter(Boolean);
  const trained = now.value?.training?.adapters.map((adapter) => adapter.name) ?? [];
  const learning = names.filter((name) => learns(name, trained, known));
  const collected = collects.value ? learning : [];
  return (
    <>
      <Setup
        groups={groups}
        sides={chosen}
        onSides={(changed) => {
          sides.value = changed;
        }}
        settings={settings.value}
        onSettings={(changed) => {
          settings.value = changed;
        }}
      />
      <Transcript />
      <Question
        onAsk={(question) => {
          sides.value = chosen; // what was suggested stays, also if there are more versions then
          return ask(question, names, settings.value, collected);
        }}
      />
      <Learn
        checked={collects.value}
        onChange={(checked) => {
          collects.value = checked;
        }}
        chosen={names}
        learning={learning}
      />
    </>
  );
}

/** The base model, and beside it the first adapter, if there is one. */
const suggested = ({ models }: Known): Sides => ({
  first: "base",
  second: models.find((model) => model.parent !== null)?.id ?? "",
});

function Question({ onAsk }: { onAsk: (question: string) => Promise<void> }) {
  const id = useId();
  const [text, setText] = useState("");
  const busy = underWay.value !== null;
  const send = (event: Event) => {
    event.preventDefault();
    if (text.trim() && !busy) {
      setText("");
      void onAsk(text);
    }
  };
  return (
    <form class="card question-form" onSubmit={send}>
      <p class="field">
        <label for={id}>Message</label>
        <textarea
          id={id}
          rows={2}
          value={text}
          aria-describedby={`${id}-keys`}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && send(event)}
        />
      </p>
      <p class="buttons">
        <small id={`${id}-keys`}>Enter sends, Shift and Enter begins a line.</small>
        <span class="hidden" role="status">
          {busy ? "An answer is being made." : turns.value.length > 0 ? "Answered." : ""}
        </span>
        {turns.value.length > 0 && (
          <button type="button" onClick={clear}>
            Clear
          </button>
        )}
        {busy ? (
          <button type="button" onClick={() => underWay.value?.abort()}>
            Stop
          </button>
        ) : (
          <button type="submit" class="strong" disabled={!text.trim()}>
            Send
          </button>
        )}
      </p>
    </form>
  );
}
