// Runs: two steps compared by rank and kind, and the steps of a run, with the rank that was slowest in most of them.

const compared = { one: 0, other: 1 };

const runSteps = () => known.filter(({ isRun }) => isRun);

function fillRuns() {
  const names = known.map(({ name }) => name);
  for (const side of ["one", "other"]) {
    const select = byId(side);
    select.replaceChildren(...names.map((name, k) => make("option", { value: String(k), selected: k === compared[side] }, name)));
  }
  fillComparison();
  fillRunSteps();
}

// ---- two steps ----

function simpleTable(head, rows) {
  return make("div", { className: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((words) => make("td", {}, words)))))));
}

/** What changed from one step to the other: by rank and kind, and which changes are largest. */
function fillComparison() {
  const one = known[compared.one], other = known[compared.other];
  byId("compare").hidden = known.length < 2;
  if (known.length < 2 || !one || !other) return;
  const ranks = Math.min(one.peaks.length, other.peaks.length);
  const before = sumsOf(one).slice(0, ranks), after = sumsOf(other).slice(0, ranks);
  const columns = occurringParts([...before, ...after], Math.max(one.makespan, other.makespan) * 1e-4);
  const changes = before.map((sums, rank) => columns.map(({ time }) => time(after[rank]) - time(sums)));
  const most = Math.max(...changes.flat().map(Math.abs)) || 1;
  byId("changes").replaceChildren(
    make("p", {}, changedWords(one, other, columns, changes)),
    simpleTable(["rank", ...columns.map(({ name }) => name), "in all, busy"], changes.map((row, rank) => [
      other.names[rank], ...row.map((change) => changeCell(change, most)),
      changeCell(total(data.phases.map((_, k) => after[rank].phases[k] - before[rank].phases[k])), most),
    ])));
}

function changeCell(change, most) {
  const share = change / most;
  const words = Math.abs(share) < 0.005 ? "–" : `${change > 0 ? "+" : "−"}${duration(Math.abs(change))}`;
  const color = share > 0 ? "var(--critical)" : "var(--backward_weight)";
  return make("span", { className: "change", style: `background: color-mix(in srgb, ${color} ${Math.round(60 * Math.abs(share))}%, transparent)` }, words);
}

/** The growth of the step, and the largest change of work, which waits follow from. */
function changedWords(one, other, columns, changes) {
  const whole = `${comparedWords(one, other)}: ${duration(one.makespan)} became ${duration(other.makespan)}`;
  const work = columns.map((column, k) => [column.name, k]).filter(([phase]) => data.phases.some((each) => each.name === phase));
  let change = 0, rank = 0, name = "";
  changes.forEach((row, r) => work.forEach(([phase, k]) => {
    if (Math.abs(row[k]) > Math.abs(change)) [change, rank, name] = [row[k], r, phase];
  }));
  if (Math.abs(change) < 0.001 * one.makespan) return `${whole}. No rank computes longer or shorter.`;
  return `${whole}. What changed most is the ${name} on ${other.names[rank]}: ${duration(Math.abs(change))} ${change > 0 ? "longer" : "shorter"} in all.`;
}

/** Add the steps of another page, such as yesterday's. */
async function openOther(file) {
  const found = /<script[^>]*id="data"[^>]*>([\s\S]*?)<\/script>/.exec(await file.text());
  const problem = (words) => (byId("opened").textContent = words);
  if (!found) return problem(`${file.name} is no page of pipec: it holds no steps`);
  const others = await unpack(found[1]).catch(() => null);
  if (!others) return problem(`the steps in ${file.name} cannot be read: it was written by another version`);
  if (others.unit !== data.unit) return problem(`${file.name} has times in ${others.unit}, this page in ${data.unit}`);
  const added = others.timelines.slice(0, 2).filter(({ isRun }) => !isRun).slice(-1);
  const own = known.findLastIndex(({ isRun, part }) => !isRun && part === added[0].part);
  for (const timeline of added) {
    timeline.name = `${timeline.name} of ${file.name}`;
    prepare(timeline);
    known.push(timeline);
  }
  compared.one = known.length - 1;
  compared.other = own < 0 ? 0 : own;
  readColors();
  problem(`opened ${file.name}`);
  showTimelines([...timelines, ...added]);
  layOut();
  fillSummary();
  fillRuns();
}

// ---- a run ----

/** The rank that computed longest in a step. */
function slowestRank(timeline) {
  const busy = sumsOf(timeline).map(({ phases }) => total(phases));
  return busy.indexOf(Math.max(...busy));
}

function fillRunSteps() {
  const steps = runSteps();
  byId("run").hidden = steps.length === 0;
  if (!steps.length) return;
  byId("runWords").textContent = stragglerWords(steps);
  byId("idleLine").replaceChildren(idleChart(computing(steps)));
}

/** The steps with microbatches, unless all are updates alone. */
function computing(steps) {
  const found = steps.filter(({ part }) => part !== "update");
  return found.length ? found : steps;
}

/** A rank that is slowest in most steps is a straggler. */
function stragglerWords(all) {
  const steps = computing(all), counts = new Map();
  for (const rank of steps.map(slowestRank)) counts.set(rank, (counts.get(rank) ?? 0) + 1);
  const [rank, count] = [...counts].sort((one, other) => other[1] - one[1])[0];
  const times = steps.map(({ makespan }) => makespan).sort((one, other) => one - other);
  const spread = `${steps.length} steps took ${duration(times[0])} to ${duration(times.at(-1))}, half of them less than ${duration(times[times.length >> 1])}.`;
  const noted = all.filter(({ note }) => note);
  const notes = noted.length ? ` ${noted.map(({ name, note }) => `${name}: ${note}`).join("; ")}.` : "";
  const others = (data.pipeline?.notes ?? []).map(([number, note]) => `step ${number} (${note})`);
  const unrecorded = others.length ? ` Not recorded: ${others.slice(0, 8).join(", ")}${others.length > 8 ? ` and ${others.length - 8} more` : ""}.` : "";
  const busiest = count > steps.length / 2 ? ` ${capital(steps[0].names[rank])} computed longest in ${count} of ${steps.length} steps.` : " No rank was the slowest in most of them.";
  return spread + busiest + notes + unrecorded;
}

/** The idle share of each step, as bars that can be clicked. */
function idleChart(steps) {
  const most = Math.max(...steps.map(({ idle }) => idle)) || 1;
  return make("div", { className: "chart", attributes: { role: "img", "aria-label": "idle share of each step" } },
    ...steps.map((timeline) => make("button", {
      style: `height: ${Math.max((70 * timeline.idle) / most, 2)}px`, title: `${timeline.name}: ${duration(timeline.makespan)}, ${percent(timeline.idle)} idle; longest: rank ${timeline.numbers[slowestRank(timeline)]}${timeline.note ? `; ${timeline.note}` : ""}`,
      onclick: () => showRunStep(timeline), attributes: { "aria-label": `${timeline.name}, ${percent(timeline.idle)} idle` },
    })));
}

/** Give a step of the run lanes of its own, below the others. */
function showRunStep(timeline) {
  showTimelines([...known.filter(({ isRun }) => !isRun), timeline]);
  openTab("timeline");
  layOut();
  redraw();
}

for (const side of ["one", "other"])
  byId(side).addEventListener("change", (event) => {
    compared[side] = +event.target.value;
    fillComparison();
  });
byId("file").addEventListener("change", (event) => event.target.files[0] && openOther(event.target.files[0]));
