// k6: virtual users that complete and chat at once. BASE_URL and ASKED come by environment; prints its summary as JSON.

import { check } from "k6";
import http from "k6/http";

const { model, question, prompt, max_tokens } = JSON.parse(__ENV.ASKED);
const headers = { "Content-Type": "application/json" };

export const options = { vus: 4, iterations: 12, thresholds: { checks: ["rate==1"], http_req_failed: ["rate==0"] } };

function post(path, body) {
  const asked = JSON.stringify({ model, max_tokens, temperature: 0, ...body });
  return http.post(`${__ENV.BASE_URL}${path}`, asked, { headers });
}

export default function () {
  const completion = post("/completions", { prompt });
  const chat = post("/chat/completions", { messages: [{ role: "user", content: question }] });
  const stream = post("/completions", { prompt, stream: true });
  check(completion, { "a completion says Paris": (answer) => answer.json("choices.0.text").includes("Paris") });
  check(chat, { "a chat says Paris": (answer) => answer.json("choices.0.message.content").includes("Paris") });
  check(stream, { "a stream ends with [DONE]": (answer) => answer.body.endsWith("data: [DONE]\n\n") });
}

export function handleSummary({ metrics, root_group }) {
  return { stdout: JSON.stringify({ metrics, checks: root_group.checks }) };
}
