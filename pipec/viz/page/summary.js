// The summary: what bounds the step in sentences, and for each rank a bar and numbers of what its time is spent on.

const MOST_ROWS = 200;

function fillSummary() {
  const steps = timelines;
  const sentences = steps.map((timeline) => make("div", {},
    steps.length > 1 ? make("h2", {}, timeline.name) : null,
    make("p", {}, ...timeWords(timeline)),
    make("ul", {}, ...findingsOf(timeline).map((words) => make("li", {}, words)))));
  byId("sentences").className = steps.length > 1 ? "several" : "";
  byId("sentences").replaceChildren(...sentences, ...furtherWords(steps).map((words) => make("p", {}, words)));
  byId("ranks").replaceChildren(sumsTable(steps.map((timeline) => [timeline, sumsOf(timeline)]), longest, ""));
}

/** Makespan and span, each with its own idle share. */
function timeWords({ makespan, span, idle, bubble, microbatches, schedule, part }) {
  if (part === "update")
    return [make("b", {}, duration(makespan)), ` for the update alone, after steps without one, of which ranks are idle for ${percent(idle)}.`];
  const what = part === "accumulate" ? "step without its update" : "step";
  return [
    make("b", {}, duration(makespan)),
    ` for a ${what} of ${schedule} with ${microbatches} microbatches (its makespan), of which ranks are idle for ${percent(idle)}. `,
    `From its first to its last compute the slowest rank takes ${duration(span)} (the span); ranks compute nothing for ${percent(bubble)} of that (the bubble).`,
  ];
}

const capital = (words) => words.charAt(0).toUpperCase() + words.slice(1);

function findingsOf(timeline) {
  const found = [slowestStageWords(timeline), ...timeline.findings];
  if (timeline === timelines[0] && timeline.part === "whole") found.push(...nextBestWords(timeline));
  return found.filter(Boolean).map((words) => `${capital(words)}.`);
}

/** The time that each stage computes for a microbatch. */
function stageTimes({ computes: { stage, start, end, microbatch } }) {
  const times = [];
  for (let i = 0; i < stage.length; i++)
    if (microbatch[i] >= 0) times[stage[i]] = (times[stage[i]] ?? 0) + end[i] - start[i];
  return Array.from(times, (time) => time ?? 0);
}

function slowestStageWords(timeline) {
  const times = (timeline.stageTimes ??= stageTimes(timeline));
  const mean = total(times) / times.length;
  if (times.length < 2 || !mean) return "";
  const slowest = times.indexOf(Math.max(...times)), excess = times[slowest] / mean - 1;
  if (excess < 0.02) return "all stages take equally long, within 2%";
  return `stage ${slowest} is the slowest, ${ratioWords(1 + excess)} than the mean of the stages${moduleWords(slowest)}`;
}

function moduleWords(stage) {
  const modules = data.pipeline?.stages[stage]?.modules ?? [];
  return modules.length ? `: ${modules.join(" to ")}` : "";
}

/** What the best plan that was tried and not taken would cost. */
function nextBestWords(timeline) {
  const found = [];
  const best = data.pipeline?.alternatives.find(({ rejected }) => !rejected.startsWith("needs"));
  if (best) {
    const words = `the next best plan tried is ${best.schedule} with ${best.microbatches} microbatches on ${best.stages} stages`;
    const peak = Math.max(0, ...timeline.memory.map(highest)), more = best.peak - peak;
    const memory = !peak || Math.abs(more) < 0.01 * peak ? "" : `, ${bytes(Math.abs(more))} ${more > 0 ? "more" : "less"} at the peak`;
    found.push(`${words}: ${ratioWords(best.seconds / timeline.makespan)}${memory}`);
  }
  return found;
}

/** How each further step, or part of a step, compares with the first of the same. */
function furtherWords(steps) {
  return steps.flatMap((other) => {
    const first = steps.find(({ part }) => part === other.part);
    return first === other ? [] : [`${capital(comparedWords(first, other))}.`];
  });
}

/** A row for each rank: a bar, and the time of each part. Of several timelines, the rows of a rank are together. */
function sumsTable(steps, whole, caption) {
  const all = steps.flatMap(([, sums]) => sums);
  const columns = occurringParts(all, whole * 1e-4);
  const ranks = Math.max(...steps.map(([, sums]) => sums.length));
  let rows = Array.from({ length: ranks }, (_, rank) => rank);
  if (ranks > MOST_ROWS) {
    const idle = steps[0][1].map(idleOf);
    rows = rows.sort((one, other) => idle[other] - idle[one]).slice(0, MOST_ROWS);
    caption = `${caption} the ${MOST_ROWS} most idle of ${ranks} ranks`;
  }
  const head = ["rank", "", ...columns.map(({ name }) => name), "waits most for"];
  const body = rows.flatMap((rank) =>
    steps.filter(([, sums]) => sums[rank]).map(([timeline, sums]) => sumsRow(timeline, rank, sums[rank], columns, whole, steps.length > 1)));
  const marks = ({ color }) => [make("i", { style: `background: var(--${color})` })];
  return make("div", { className: "scroll" },
    make("table", { className: "sums" },
      caption ? make("caption", {}, caption) : null,
      make("thead", {}, make("tr", {}, ...head.map((name, k) => make("th", { scope: "col" }, ...(columns[k - 2] ? marks(columns[k - 2]) : []), name)))),
      make("tbody", {}, ...body)));
}

function sumsRow(timeline, rank, sums, columns, whole, several) {
  const name = `${timeline.names[rank]}${several ? `, ${timeline.name}` : ""}`;
  const open = () => {
    if (view.tab === "summary") openTab("timeline");
    if (timeline.lanes[rank]) scrollTo(timeline.lanes[rank]);
    select({ kind: "lane", timeline, rank, index: null });
  };
  const bar = columns.map(({ name: part, color, time }) =>
    make("span", { style: `width: ${(100 * time(sums)) / whole}%; background: var(--${color})`, title: `${part}: ${duration(time(sums))}` }));
  const longestWait = [...sums.waiting].sort((one, other) => other[1] - one[1])[0];
  return make("tr", {},
    make("th", { scope: "row" }, make("button", { className: "plain", onclick: open, title: "show its lane" }, name)),
    make("td", { className: "bar" }, make("div", { attributes: { role: "img", "aria-label": `${percent(idleOf(sums) / whole)} idle` } }, ...bar)),
    ...columns.map((part) => make("td", {}, ...partWords(part, sums))),
    make("td", {}, longestWait ? `rank ${timeline.numbers[longestWait[0]]}, ${duration(longestWait[1])}` : ""));
}

/** The time of a part; of messages, collectives and copies also what is hidden behind other work. */
function partWords({ name, time }, sums) {
  const least = longest * 1e-4; // less is rounding
  const words = time(sums) > least ? duration(time(sums)) : "–";
  const hidden = sums.hidden[name];
  return hidden > least ? [words, make("small", {}, ` + ${duration(hidden)} hidden`)] : [words];
}
