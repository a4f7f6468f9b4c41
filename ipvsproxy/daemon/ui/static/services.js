// The table of all Services. The server searches, sorts and cuts it into pages; only rows that have changed are drawn again.

import { count, el, figure, spark, whole, write } from "./parts.js";

const HEADS = [
  { title: "Service", sort: "name" },
  { title: "Problem", sort: "problems" },
  { title: "Type" },
  { title: "Addresses" },
  { title: "Ports" },
  { title: "Endpoints", sort: "endpoints", kind: "number" },
  { title: "Connections/s", sort: "connections", kind: "number" },
  { title: "Open", kind: "number" },
  { title: "Packets/s", sort: "packets", kind: "number" },
  { title: "Bytes/s", sort: "bytes", kind: "number" },
];
const TYPES = ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"];
const TYPED_MS = 200;

export function open(main, where, { ask, refresh }) {
  let state = read(where.query);
  let rows = new Map(); // by name: the row as last drawn, and its element
  let typed = null;

  const text = (name, placeholder) => el("input", { id: name, name, type: "search", autocomplete: "off", spellcheck: "false", maxlength: 253, placeholder });
  const choice = (name, values, first = null) => el("select", { id: name, name }, first && el("option", { value: "" }, first), values.map((value) => el("option", { value }, value)));
  const label = (title, control) => el("label", {}, el("span", {}, title), control);
  const form = el(
    "form",
    { class: "controls", role: "search", oninput: type, onsubmit: (event) => event.preventDefault() },
    label("Search", text("query", "name, address, port, pod address")),
    label("Namespace", text("namespace", "any")),
    label("Node", text("node", "any")),
    label("Type", choice("type", TYPES, "any")),
    label("Rows", choice("size", ["25", "50", "100", "200"])),
    label("Problems only", el("input", { type: "checkbox", name: "problems", value: "only" })),
  );
  fillForm();
  const told = el("p", { class: "told", role: "status" });
  const previous = el("button", { type: "button", onclick: () => turn(-1) }, "← Previous");
  const next = el("button", { type: "button", onclick: () => turn(1) }, "Next →");
  const number = el("span", { class: "pages" });
  const buttons = new Map();
  const heads = HEADS.map((head) => {
    if (!head.sort) return el("th", { scope: "col", class: head.kind }, head.title);
    const button = el("button", { type: "button", onclick: () => sort(head.sort) }, head.title);
    const cell = el("th", { scope: "col", class: head.kind }, button);
    buttons.set(head.sort, cell);
    return cell;
  });
  const body = el("tbody");
  main.append(
    el("h1", {}, "Services"),
    form,
    told,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Services" }, el("table", { class: "services" }, el("caption", {}, "Services, with their endpoints and traffic now"), el("thead", {}, el("tr", {}, heads)), body)),
    el("div", { class: "controls pager" }, previous, number, next),
  );
  let pages = 1;
  let page = 1;

  return {
    title: "Services",
    update(to) {
      state = read(to.query);
      fillForm();
      return true;
    },
    async fetch() {
      const asked = JSON.stringify(state);
      const answer = await ask("services", state);
      return () => {
        if (asked === JSON.stringify(state)) draw(answer);
      };
    },
    press(key) {
      if (key === "[" || key === "]") return turn(key === "[" ? -1 : 1);
      if (key !== "j" && key !== "k") return false;
      const links = [...body.querySelectorAll("a")];
      const at = links.indexOf(document.activeElement);
      const to = at < 0 ? 0 : at + (key === "j" ? 1 : -1);
      links[Math.max(0, Math.min(links.length - 1, to))]?.focus();
      return true;
    },
  };

  function type() {
    clearTimeout(typed);
    typed = setTimeout(() => move({ problems: "", ...Object.fromEntries(new FormData(form)), page: 1 }), TYPED_MS);
  }

  function fillForm() {
    for (const control of form.elements) {
      if (control.type === "checkbox") control.checked = state[control.name] !== "";
      else if (control !== document.activeElement) control.value = state[control.name];
    }
  }

  function sort(by) {
    const is = state.sort === by;
    const order = is ? (state.order === "asc" ? "desc" : "asc") : by === "name" ? "asc" : "desc";
    move({ sort: by, order, page: 1 });
  }

  function turn(by) {
    const to = Math.max(1, Math.min(pages, page + by));
    if (to !== page) move({ page: to });
    return true;
  }

  // The place says what is shown, so that it can be kept and sent.
  function move(to) {
    const wanted = { ...state, ...to };
    const plain = read(new URLSearchParams());
    const given = Object.entries(wanted).filter(([name, value]) => String(value) !== plain[name]);
    const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
    history.replaceState(null, "", `#/services${text ? `?${text}` : ""}`);
    state = read(new URLSearchParams(text));
    refresh();
  }

  function draw(answer) {
    pages = answer.pages;
    page = answer.page;
    const before = rows;
    rows = new Map(
      answer.services.map((row) => {
        const text = JSON.stringify(row);
        const drawn = before.get(row.name);
        return [row.name, drawn?.text === text ? drawn : { text, element: fill(drawn?.element || el("tr"), row) }];
      }),
    );
    place([...rows.values()].map((row) => row.element));
    write(told, answer.matching === answer.total ? count(answer.total, "Service") : `${whole(answer.matching)} of ${count(answer.total, "Service")}`);
    write(number, `Page ${whole(answer.page)} of ${whole(answer.pages)}`);
    previous.disabled = answer.page <= 1;
    next.disabled = answer.page >= answer.pages;
    for (const [by, cell] of buttons) {
      if (by === state.sort) cell.setAttribute("aria-sort", state.order === "asc" ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    }
  }

  // Move only what is not in its place, so that the selection stays. A row that moves loses the focus: it gets it back.
  function place(elements) {
    const focused = document.activeElement;
    elements.forEach((element, index) => {
      if (body.children[index] !== element) body.insertBefore(element, body.children[index] || null);
    });
    if (focused !== document.activeElement && body.contains(focused)) focused.focus({ preventScroll: true });
    while (body.children.length > elements.length) body.lastElementChild.remove();
    if (!elements.length) body.append(el("tr", {}, el("td", { class: "empty", colspan: HEADS.length }, "No Service matches.")));
  }
}

function read(query) {
  const sort = query.get("sort") || "name";
  return {
    query: query.get("query") || "",
    namespace: query.get("namespace") || "",
    node: query.get("node") || "",
    type: query.get("type") || "",
    problems: query.get("problems") || "",
    sort,
    order: query.get("order") || (sort === "name" ? "asc" : "desc"),
    page: query.get("page") || "1",
    size: query.get("size") || "50",
  };
}

function more(shown, all) {
  return all > shown ? ` +${all - shown}` : "";
}

export function portText(port) {
  const name = port.name ? `${port.name} ` : "";
  return `${name}${port.protocol} ${port.port}${port.nodePort ? `:${port.nodePort}` : ""}`;
}

function fill(element, row) {
  const { ready, draining, unused } = row.endpoints;
  const cells = [
    ["Service", "name", link(element, row.name)],
    ["Problem", "problem", row.problems.length ? row.problems.map((problem) => el("span", {}, `! ${problem}`)) : row.served ? "" : el("small", {}, `not served: ${row.notServed}`)],
    ["Type", "", row.type],
    ["Addresses", "address", row.addresses.slice(0, 2).join("\n") + more(2, row.addressCount)],
    ["Ports", "ports", row.ports.slice(0, 2).map(portText).join("\n") + more(2, row.portCount)],
    ["Endpoints", "number", endpoints(ready, draining, unused)],
    ["Connections/s", "number", [spark(row.history.connectionsPerSecond, "connections per second lately"), el("span", {}, figure(row.connectionsPerSecond))]],
    ["Open", "number", [figure(row.activeConnections), row.inactiveConnections ? el("small", {}, ` ${figure(row.inactiveConnections)} inactive`) : null]],
    ["Packets/s", "number", figure(row.packetsPerSecond)],
    ["Bytes/s", "number", [spark(row.history.bytesPerSecond, "bytes per second lately"), el("span", {}, figure(row.bytesPerSecond))]],
  ];
  cells.forEach(([label, kind, content], index) => {
    const cell = element.children[index] || element.appendChild(el(index ? "td" : "th", { "data-label": label, class: kind, scope: index ? null : "row" }));
    if (content !== null) cell.replaceChildren(...[content].flat().filter((part) => part !== null));
  });
  return element;
}

// The link stays the same element, so that it keeps the focus; null means that it is there.
function link(element, name) {
  if (element.children.length) return null;
  return el("a", { href: `#/service/${name.split("/").map(encodeURIComponent).join("/")}` }, name);
}

function endpoints(ready, draining, unused) {
  return [
    el("span", {}, `${whole(ready)} ready`),
    draining ? el("small", { class: "warn" }, ` ${whole(draining)} draining`) : null,
    unused ? el("small", {}, ` ${whole(unused)} unused`) : null,
  ];
}
