/** The frame around every view: navigation, the server's state, and what went wrong. */

import { useEffect, useRef } from "preact/hooks";
import { loggedOut } from "./api/client";
import { Banner } from "./components/banner";
import { Toasts } from "./components/toast";
import { lostSince, now, refused } from "./live/stats";
import { link, place } from "./router";
import { VIEWS } from "./views";

export function App() {
  const view = VIEWS.find((each) => each.name === place.value.view) ?? VIEWS[0];
  const main = useRef<HTMLElement>(null);
  const current = useRef<HTMLAnchorElement>(null);
  useEffect(() => {
    document.title = `${view.title} · MLX ParaLLM`;
    current.current?.scrollIntoView({ inline: "center", block: "nearest" }); // on a phone, the navigation scrolls
  }, [view]);
  return (
    <>
      <button type="button" class="skip" onClick={() => main.current?.focus()}>
        Skip to the content
      </button>
      <header>
        <p class="brand">MLX ParaLLM</p>
        <nav aria-label="Views">
          {VIEWS.filter((each) => each === view || (each.isListed?.(now.value) ?? true)).map((each) => (
            <a
              key={each.name}
              ref={each === view ? current : null}
              href={link(each.name)}
              aria-current={each === view ? "page" : undefined}
            >
              {each.title}
            </a>
          ))}
        </nav>
        <ServerState />
        <LogOut />
      </header>
      <Problems />
      <main ref={main} tabIndex={-1}>
        <h1>{view.title}</h1>
        <view.component rest={place.value.rest} />
      </main>
      <footer>
        <a href="/docs">HTTP API</a> <a href="/metrics">Metrics</a> <a href={licenses()}>Licences</a>
      </footer>
      <Toasts />
    </>
  );
}

const licenses = (): string | undefined => document.querySelector<HTMLLinkElement>("link[rel=license]")?.href;

const STATES = {
  serving: "Serving",
  paused: "Paused",
  asleep: "Asleep",
  draining: "Shutting down",
  dead: "Stopped",
} as const;

function ServerState() {
  const state = now.value?.state;
  if (lostSince.value !== null) {
    return <p class="state dead">No answer</p>;
  }
  return state ? (
    <p class={`state ${state}`}>
      <span class="hidden">The server: </span>
      {STATES[state]}
    </p>
  ) : null;
}

function LogOut() {
  const caller = now.value?.caller;
  return caller?.required ? (
    <form method="post" action="/logout" class="caller">
      <span>
        {caller.name} <small>({caller.role})</small>
      </span>
      <button type="submit">Log out</button>
    </form>
  ) : null;
}

function Problems() {
  if (loggedOut.value) {
    return (
      <Banner>
        You are not logged in any more. <a href="/login?next=/dashboard">Log in</a>
      </Banner>
    );
  }
  if (lostSince.value !== null) {
    return <Banner>The server does not answer. This page connects again by itself; its figures are old.</Banner>;
  }
  if (refused.value) {
    return <Banner>{refused.value.message}</Banner>;
  }
  if (now.value?.state === "dead") {
    return (
      <Banner>The device thread has stopped, so no request is answered. Restart the server; its log says why.</Banner>
    );
  }
  return now.value?.notices.length ? <Banner>{now.value.notices.join(" ")}</Banner> : null;
}
