import type { Message } from "../../api/lessons";

/** The messages of a prompt before the last one, if there are any. */
export const Earlier = ({ messages }: { messages: readonly Message[] }) =>
  messages.length > 1 ? (
    <dl class="earlier">
      {messages.slice(0, -1).map(({ role, content }, order) => (
        <div key={order}>
          <dt>{role}</dt>
          <dd>{content}</dd>
        </div>
      ))}
    </dl>
  ) : null;
