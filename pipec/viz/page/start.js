// Start: tabs, the address that remembers the tab, the legend, and the page's first drawing.

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
  try {
    history.replaceState(null, "", `#tab=${name}`);
  } catch {
    // a page in an output cell of a notebook has no address
  }
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

/** Open the tab that the address names, if the page has it. */
function readAddress() {
  const name = new URLSearchParams(location.hash.slice(1)).get("tab");
  openTab(name in TABS && hasTab(name) ? name : "summary");
}

// ---- the legend ----

function addLegend() {
  const legend = byId("legend"), memory = make("span", { id: "memoryLegend" });
  const add = (color, words, className = "", parent = legend) => {
    const mark = make("i", { className, style: `background: var(--${color})` });
    parent.append(make("span", {}, mark, words));
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
  for (const kind of kinds) add(`memory-${kind}`, kind.replace("_", " "), "", memory);
  if (known.some(({ memory: curves }) => curves.some(({ host }) => host))) add("memory-offloaded", "below: offloaded, in host memory", "", memory);
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
  resize();
  new ResizeObserver(resize).observe(canvas);
  addEventListener("hashchange", readAddress);
  document.body.dataset.ready = "true";
}

byId("openKeys").addEventListener("click", () => byId("keys").showModal());
byId("closeKeys").addEventListener("click", () => byId("keys").close());
start();
