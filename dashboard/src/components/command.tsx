import { toast } from "./toast";

/** A command to paste into a terminal, with a button that copies it. */
export function Command({ text }: { text: string }) {
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    toast("Copied.");
  };
  return (
    <div class="command">
      <pre>
        <code>{text}</code>
      </pre>
      {navigator.clipboard && (
        <button type="button" onClick={() => void copy()}>
          Copy
        </button>
      )}
    </div>
  );
}
