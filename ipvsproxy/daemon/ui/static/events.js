// What has happened: changes, failures, drift and its repair, the API server's and the node's health.

import { chip, count, el, seconds, time, whole, write } from "./parts.js";

const MARKS = { sync: ["", "change"], failure: ["bad", "✗ failure"], drift: ["warn", "! drift"], watch: ["warn", "! watch"], health: ["warn", "! health"] };
const MOST = 500;

export function open(main, _where, { ask, refresh }) {
  let last = 0;
  let startedAt = null; // of the process whose events these are
  const body = el("tbody");
  const told = el("p", { class: "told", role: "status" }, "");
  const only = el("input", { id: "only", type: "checkbox", onchange: filter });
  main.append(
    el("h1", {}, "Events"),
    el("div", { class: "controls" }, only, el("label", { for: "only" }, "Only failures, drift, watches and health")),
    told,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events" }, el("table", { class: "events" }, el("caption", {}, "Events, the newest first"), el("thead", {}, el("tr", {}, ["When", "What", "Event", "Services", "Took", "Latency"].map((head) => el("th", { scope: "col" }, head)))), body)),
    el("p", { class: "note" }, "“Took” is the time of the sync; “latency” is the time from the arrival of its oldest change to its end."),
  );

  return {
    title: "Events",
    async fetch() {
      const answer = await ask("events", { since: last });
      return () => {
        const isOther = startedAt !== null && startedAt !== answer.startedAt;
        startedAt = answer.startedAt;
        if (isOther) {
          body.replaceChildren(); // it counts anew: ask for all of its events
          last = 0;
          return refresh();
        }
        last = answer.last;
        const isReplaced = (id) => answer.events.some((event) => event.firstId <= id && id < event.id);
        for (const element of [...body.children]) if (isReplaced(Number(element.dataset.id))) element.remove();
        body.prepend(...answer.events.map(row));
        while (body.children.length > MOST) body.lastElementChild.remove();
        filter();
      };
    },
  };

  function filter() {
    let shown = 0;
    for (const element of body.children) {
      element.hidden = only.checked && element.dataset.kind === "sync";
      shown += !element.hidden;
    }
    write(told, `${count(shown, "event")}${last > MOST ? `; only the last ${MOST} are kept` : ""}`);
  }
}

function row(event) {
  const [kind, text] = MARKS[event.kind] || ["", event.kind];
  const names = event.services.map((name, index) => [index ? ", " : "", el("a", { href: `#/service/${name.split("/").map(encodeURIComponent).join("/")}` }, name)]);
  return el(
    "tr",
    { "data-kind": event.kind, "data-id": event.id },
    el("td", { "data-label": "When" }, time(event.at)),
    el("td", { "data-label": "What" }, chip(kind, text)),
    el("td", { "data-label": "Event", class: "wide" }, event.text),
    el("td", { "data-label": "Services" }, names, event.serviceCount > event.services.length && ` and ${whole(event.serviceCount - event.services.length)} more`),
    el("td", { "data-label": "Took", class: "number" }, seconds(event.durationSeconds)),
    el("td", { "data-label": "Latency", class: "number" }, seconds(event.latencySeconds)),
  );
}
