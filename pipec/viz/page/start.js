// Start: tabs, the address that remembers the view, the legend, and the page's first drawing.

const TABS = {
  summary: fillSummary, timeline: () => {}, memory: () => {}, code: fillCode, runs: fillRuns,
};

function hasTab(name) {
  if (name === "memory") return known.some(({ memory }) => memory.length);
  return name !== "code" || data.pipeline !== null;
}

function openTab(name) {
  view.tab = name;
  document.body.dataset.tab = name;
  for (const tab of byId("tabs").children) {
    tab.setAttribute("aria-selected", String(tab.id === `tab-${name}`));
    tab.tabIndex = tab.id === `tab-${name}` ? 0 : -1;
  }
  TABS[name]();
  layOut();
  showDetails();
  rememberView();
  redraw();
}

for (const tab of byId("tabs").children) tab.addEventListener("click", () => openTab(tab.id.slice(4)));
byId("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.stopPropagation();
  const tabs = [...byId("tabs").children].filter((tab) => !tab.hidden);
  const next = tabs[(tabs.findIndex((tab) => tab.id === `tab-${view.tab}`) + step + tabs.length) % tabs.length];
  openTab(next.id.slice(4));
  next.focus();
});

// ---- the address ----

let remembering = 0;
let isOpening = true;

/** Put the view into the address, so that a link shows the same. */
function rememberView() {
  if (isOpening) return;
  clearTimeout(remembering);
  remembering = setTimeout(() => {
    try {
      history.replaceState(null, "", `#${addressOf()}`);
    } catch {
      // a page in an output cell of a notebook has no address
    }
  }, 150);
}

function addressOf() {
  const parts = { tab: view.tab };
  const short = (time) => +time.toPrecision(8);
  if (view.start > 0 || view.end < longest) Object.assign(parts, { from: short(view.start), to: short(view.end) });
  if (view.top) parts.top = Math.round(view.top);
  if (view.rows !== 1) parts.rows = +view.rows.toPrecision(4);
  const changed = Object.keys(shown).filter((name) => shown[name] !== (name === "messages"));
  if (changed.length) parts.flip = changed.join(",");
  if (byId("search").value) parts.q = byId("search").value;
  if (picked) parts.range = picked.map(short).join(",");
  if (selected && selected.index !== null && selected.kind !== "idle")
    parts.at = [selected.kind, selected.timeline.number, selected.rank, selected.index].join(",");
  if (view.tab === "code") parts.code = [code.rank, code.instruction, code.stage, code.line].join(",");
  return new URLSearchParams(parts).toString();
}

/** Show what the address says. What it says of things that the page lacks is passed over. */
function readAddress() {
  const parts = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const numbers = (text) => (text ?? "").split(",").map(Number);
  if (parts.from !== undefined) show(+parts.from || 0, +parts.to || longest);
  view.rows = +parts.rows || 1;
  for (const name of Object.keys(shown)) {
    shown[name] = (name === "messages") !== (parts.flip ?? "").split(",").includes(name);
    byId(name).setAttribute("aria-pressed", String(shown[name]));
  }
  const [rank, instruction, stage, line] = numbers(parts.code);
  if (parts.code && data.pipeline?.sources[stage]) Object.assign(code, { rank, instruction, stage, line });
  if (parts.range) picked = numbers(parts.range);
  if (parts.at) {
    const [kind, timeline, lane, index] = parts.at.split(",");
    if (known[timeline] && timelines.includes(known[timeline]))
      selected = /** @type {any} */ ({ kind, timeline: known[timeline], rank: +lane, index: +index, time: known[timeline].memory[lane]?.time[index] ?? 0 });
  }
  byId("search").value = parts.q ?? "";
  openTab(parts.tab in TABS && hasTab(parts.tab) ? parts.tab : "summary");
  if (parts.q) search(parts.q);
  resize();
  view.top = +parts.top || 0;
  layOut();
  redraw();
}

// ---- the legend ----

function addLegend() {
  const legend = byId("legend");
  const add = (color, words, className = "") => {
    const mark = make("i", { className });
    mark.style.background = `var(--${color})`;
    legend.append(make("span", {}, mark, words));
  };
  const occurs = (column, i) => known.some((timeline) => column(timeline).includes(i));
  data.phases.forEach(({ key, name }, i) => occurs(({ computes }) => computes.phase, i) && add(key, name));
  data.ops.forEach(({ key, name }, i) => occurs(({ collectives }) => collectives.op, i) && add(key, name));
  data.payloads.forEach((name, i) => {
    if (["activation", "gradient"].includes(name) && occurs(({ messages }) => messages.payload, i)) add(name, name, "arrow");
  });
  if (known.some(({ lastChunk }) => lastChunk)) legend.append("lighter: later stage");
  if (known.some(({ host }) => host)) legend.append(make("span", { className: "hatched" }, "hatched: host, before the first instruction"));
  add("curve", "in flight");
  const kinds = new Set(known.flatMap(({ memory }) => memory.flatMap(({ kinds: own }) => Object.keys(own))));
  const memory = make("span", { id: "memoryLegend" });
  const addMemory = (kind, words) => {
    const mark = make("i", {});
    mark.style.background = `var(--memory-${kind})`;
    memory.append(make("span", {}, mark, words));
  };
  for (const kind of kinds) addMemory(kind, kind.replace("_", " "));
  if (known.some(({ memory: curves }) => curves.some(({ host }) => host))) addMemory("offloaded", "below: offloaded, in host memory");
  legend.append(memory);
}

/** The page of a notebook follows the scheme of the viewer, as any page does; nothing is asked of the network. */
async function start() {
  data = await unpack(byId("data").textContent);
  known = data.timelines;
  known.forEach(prepare);
  showTimelines(known.filter(({ isRun }) => !isRun));
  compared.other = Math.min(1, known.length - 1);
  for (const name of Object.keys(TABS)) byId(`tab-${name}`).hidden = !hasTab(name);
  canvas.setAttribute("aria-label", timelines.map(({ name, summary }) => `${name}: ${summary}`).join("; "));
  for (const media of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(media).addEventListener("change", () => {
      readColors();
      fillRuns();
      draw();
    });
  addLegend();
  readColors();
  readAddress();
  new ResizeObserver(resize).observe(canvas);
  addEventListener("hashchange", readAddress);
  isOpening = false;
  document.body.dataset.ready = "true";
}

byId("openKeys").addEventListener("click", () => byId("keys").showModal());
byId("closeKeys").addEventListener("click", () => byId("keys").close());
start();
