// The node: whether everything is in force and why not, what is left to do, and the last quarter of an hour.

import { SPAN_S, chip, count, el, figure, patch, plot, seconds, time, whole } from "./parts.js";

const CLOCK_S = 1;
const STEP = 1 / 90; // of the crosshair: ten seconds

export function open(main, _where, { ask }) {
  const top = el("div");
  const plots = el("section", { class: "plots", tabindex: "0", "aria-label": "The last 15 minutes; the arrow keys move the crosshair" });
  const below = el("div");
  main.append(el("h1", {}, "Node"), top, el("h2", {}, "The last 15 minutes"), plots, below);
  let points = [];
  let columns = [];
  let now = 0;
  let cursor = null; // where the crosshair of all plots stands, from 0 (15 minutes ago) to 1 (now)

  for (const moved of ["pointerdown", "pointermove"]) plots.addEventListener(moved, follow);
  plots.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && point(null));
  plots.addEventListener("blur", () => point(null));
  plots.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -STEP, ArrowRight: STEP }[event.key];
    if (!step) return;
    event.preventDefault();
    point((cursor ?? 1) + step);
  });

  return {
    title: "Node",
    async fetch() {
      const last = points.length ? points[points.length - 1][0] : 0;
      const answer = await ask("node", { since: last });
      return () => {
        columns = answer.history.columns;
        now = answer.now;
        if (last > now + CLOCK_S) points = []; // the clock of the node was set back: all points are sent again
        points = [...points, ...answer.history.points].filter((point) => point[0] > now - SPAN_S).slice(-450);
        patch(top, summary(answer));
        patch(plots, draw());
        patch(below, details(answer));
      };
    },
  };

  function follow(event) {
    const box = event.target.closest("figure")?.querySelector("svg").getBoundingClientRect();
    point(box ? (event.clientX - box.left) / box.width : null);
  }

  function point(to) {
    cursor = to === null ? null : Math.max(0, Math.min(1, to));
    if (columns.length) patch(plots, draw());
  }

  function column(name) {
    const index = columns.indexOf(name);
    return points.map((point) => point[index]);
  }

  function draw() {
    const times = column("at");
    const one = (title, name, mark, more) => plot({ title, times, now, cursor, lines: [{ name: "", mark, values: column(name) }], ...more });
    const rates = (unit) => ({ format: (value) => figure(value, `${unit}/s`), total: (value) => figure(value, unit) });
    const two = (title, names, columns, more) =>
      plot({ title, times, now, cursor, ...more, lines: names.map((name, index) => ({ name, mark: ["one", "two"][index], values: column(columns[index]) })) });
    const both = (title, name, unit) => two(title, ["in", "out"], [`${name}InPerSecond`, `${name}OutPerSecond`], rates(unit));
    const services = (value) => count(value ?? 0, "Service");
    return [
      one("Connections", "connectionsPerSecond", "one", rates("")),
      two("Open connections", ["active", "inactive"], ["activeConnections", "inactiveConnections"], { format: figure }),
      both("Packets", "packets", ""),
      both("Bytes", "bytes", "B"),
      one("Changes", "changes", "one", { bars: true, format: services, total: services }),
      one("Latency of changes", "latencySeconds", "two", { bars: true, format: (value) => (value ? seconds(value) : "none"), tick: seconds }),
    ];
  }
}

function tile(name, value, note = "", kind = "") {
  return el("div", { class: `tile ${kind}` }, el("dt", {}, name), el("dd", {}, el("span", { class: "big" }, value), note ? el("small", {}, note) : null));
}

function* summary(answer) {
  yield el(
    "p",
    { class: `verdict ${answer.inForce ? "good" : "bad"}` },
    el("b", {}, answer.inForce ? "✓ Everything is in force." : "✗ Not everything is in force."),
    answer.inForce ? " The kernel of this node holds what the API asks for." : "",
  );
  if (answer.reasons.length) yield el("ul", { class: "reasons" }, answer.reasons.map((reason) => el("li", {}, reason)));
  yield el(
    "dl",
    { class: "tiles" },
    tile("Services", whole(answer.services), `${count(answer.virtualServers, "virtual server")}, ${count(answer.realServers, "real server")}`),
    tile("Pending", whole(answer.pending.total), answer.pending.text, answer.pending.total ? "warn" : ""),
    tile("Failed", whole(answer.failed), answer.failed ? "will be tried again" : "", answer.failed ? "bad" : ""),
    tile("Drifted", whole(answer.drifted.total), answer.drifted.total ? `${answer.drifted.text} since the start` : ""),
    tile("Draining", whole(answer.draining), answer.waitingRemovals ? `${whole(answer.waitingRemovals)} to be removed` : ""),
    tile("Conflicts", whole(answer.conflicts), "", answer.conflicts ? "warn" : ""),
    tile("Connections", figure(answer.connectionsPerSecond, "/s"), `${figure(answer.activeConnections)} active, ${figure(answer.inactiveConnections)} inactive`),
    tile("Traffic", figure(answer.bytesPerSecond, "B/s"), figure(answer.packetsPerSecond, "pkt/s")),
  );
}

function table(caption, heads, rows) {
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, heads.map((head, index) => el("th", { scope: "col", class: index ? "number" : null }, head)))), el("tbody", {}, rows)),
  );
}

function* details(answer) {
  yield el("h2", {}, "Last syncs");
  yield table(
    "The last syncs, the newest first",
    ["Ended", "Services", "Done", "Failed", "Pending", "Waited", "Read", "Translated", "Applied"],
    answer.syncs.map((sync) =>
      el(
        "tr",
        {},
        el("td", {}, time(sync.endedAt), sync.isAudit ? " (audit)" : ""),
        [sync.services, sync.done, sync.failed, sync.pending].map((number) => el("td", { class: "number" }, whole(number))),
        [sync.waitedSeconds, sync.readSeconds, sync.translatedSeconds, sync.appliedSeconds].map((duration) => el("td", { class: "number" }, seconds(duration))),
      ),
    ),
  );
  yield el("h2", {}, answer.source === "manifests" ? "Source: a directory of manifests" : "API server");
  if (answer.watches.length) {
    yield table(
      "Contact with the API server",
      ["Kind", "Watch", "Last contact"],
      answer.watches.map((watch) =>
        el(
          "tr",
          {},
          el("td", {}, watch.kind),
          el("td", { class: "number" }, watch.stale ? chip("bad", "✗ stale") : watch.connected ? chip("good", "✓ connected") : chip("warn", "! not connected")),
          el("td", { class: "number" }, watch.contactAgeSeconds === null ? "never" : `${seconds(watch.contactAgeSeconds)} ago`),
        ),
      ),
    );
  }
  yield el("h2", {}, "This node");
  yield el(
    "dl",
    { class: "facts" },
    fact("Node", `${answer.node}${answer.zone ? `, zone ${answer.zone}` : ""}`),
    fact("ipvsproxy", `${answer.version}, since `, time(answer.startedAt)),
    fact("Kernel", answer.kernel.release),
    fact("Scheduler", answer.kernel.scheduler),
    answer.kernel.families.map((family) =>
      fact(family.family, `${holder(family.iptables)}, ${family.healthy ? "in time" : "late"}`, family.updatedAt ? [", complete at ", time(family.updatedAt)] : null),
    ),
    fact("Changes", answer.healthy ? "in time" : "late: /livez fails"),
    fact("Load balancers", answer.eligible ? "accepted" : "turned away: /healthz fails"),
    fact("Waiting changes", answer.oldestChangeAgeSeconds ? `the oldest for ${seconds(answer.oldestChangeAgeSeconds)}` : "none"),
  );
  yield el("p", { class: "note" }, "Figures of ", time(answer.now), ".");
}

/** What holds the rules of a family: nftables, or a variant of iptables. */
function holder(variant) {
  return variant === "nftables" ? variant : `iptables ${variant}`;
}

function fact(name, ...value) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value));
}
