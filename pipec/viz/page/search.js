// Search: `mb 3`, `stage 2`, `rank 0`, `backward`, `F3`, `layers.7`, `send`; several words must all hold.

const FIELDS = { mb: "microbatch", microbatch: "microbatch", stage: "stage", rank: "rank", segment: "segment" };
const SENDS = ["send", "sends", "recv", "message", "messages"];

/** What a compute and a message must be; `unknown` is a word that means nothing. */
function parseQuery(text) {
  const computes = [], messages = [];
  let unknown = "", wantsMessages = false;
  const rest = text.replace(/\b(mb|microbatch|stage|rank|segment)\s*(\d+)/gi, (_, word, number) => {
    addField(FIELDS[word.toLowerCase()], +number, computes, messages);
    return " ";
  });
  for (const word of rest.split(/\s+/).filter(Boolean)) {
    const payload = data.payloads.findIndex((name) => name === word.toLowerCase());
    if (SENDS.includes(word.toLowerCase()) || payload >= 0) {
      wantsMessages = true;
      if (payload >= 0) messages.push(({ messages: own }, i) => own.payload[i] === payload);
      continue;
    }
    const test = cellTest(word) ?? phaseTest(word) ?? moduleTest(word);
    if (test) computes.push(test);
    else unknown ||= word;
  }
  const all = (tests) => (timeline, i) => tests.every((test) => test(timeline, i));
  return { unknown, wantsMessages, compute: wantsMessages ? () => false : all(computes), message: all(messages) };
}

function addField(field, number, computes, messages) {
  const isRank = field === "rank";
  computes.push((timeline, i) => (isRank ? timeline.numbers[timeline.computes.rank[i]] : timeline.computes[field][i]) === number);
  messages.push(({ messages: own, numbers }, i) =>
    isRank ? numbers[own.rank[i]] === number || numbers[own.peer[i]] === number
      : field === "stage" ? own.source[i] === number || own.target[i] === number
        : field === "microbatch" ? own.microbatch[i] === number : false);
}

/** `F3`: the forward of microbatch 3. */
function cellTest(word) {
  const match = /^([A-Za-z])(\d+)$/.exec(word);
  const phase = match ? data.phases.findIndex(({ letter }) => letter === match[1]) : -1;
  return phase < 0 ? null : ({ computes }, i) => computes.phase[i] === phase && computes.microbatch[i] === +match[2];
}

function phaseTest(word) {
  const phases = new Set(data.phases.flatMap(({ key, name }, i) => (key.startsWith(word.toLowerCase()) || name.startsWith(word.toLowerCase()) ? [i] : [])));
  return phases.size ? ({ computes }, i) => phases.has(computes.phase[i]) : null;
}

/** A module of the model stands for the stages that hold it. */
function moduleTest(word) {
  const comment = new RegExp(`^ +# ${word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}[. \n]`, "m"); // above what comes of the module
  const stages = new Set((data.pipeline?.sources ?? []).flatMap((code, stage) => (comment.test(code) ? [stage] : [])));
  return stages.size ? ({ computes }, i) => stages.has(computes.stage[i]) : null;
}

let query = null; // what is searched for, as parseQuery returns it
let visited = -1; // the number of the match that was selected last

function search(text) {
  query = text.trim() ? parseQuery(text) : null;
  matches = query && !query.unknown ? query : null;
  visited = -1;
  let found = 0;
  if (matches) for (const _ of allMatches()) found++;
  byId("found").textContent = !query ? "" : query.unknown ? `nothing is called ${query.unknown}` : `${found.toLocaleString("en")} ${query.wantsMessages ? "messages" : "cells"}`;
  redraw();
}

/** The cells or messages that are searched for. @returns {Generator<[Timeline, number]>} */
function* allMatches() {
  const [kind, test] = query.wantsMessages ? ["messages", query.message] : ["computes", query.compute];
  for (const timeline of timelines)
    for (let i = 0; i < timeline[kind].rank.length; i++) if (test(timeline, i)) yield [timeline, i];
}

/** Show the cells that a search finds. */
function searchFor(text) {
  byId("search").value = text;
  openTab("timeline");
  search(text);
}

/** Select the next match, or the one before. */
function visitMatch(by = 1) {
  const found = matches ? [...allMatches()] : [];
  if (!found.length) return;
  const kind = query.wantsMessages ? "messages" : "computes";
  found.sort(([one, i], [other, j]) => one[kind].start[i] - other[kind].start[j]);
  visited = (visited + by + found.length) % found.length;
  const [timeline, index] = found[visited];
  if (!LANE_TABS.includes(view.tab)) openTab("timeline");
  const shownAt = query.wantsMessages ? timeline.messages.maker[index] : index;
  if (shownAt >= 0) reveal(timeline, shownAt);
  select({ kind: query.wantsMessages ? "message" : "compute", timeline, rank: timeline[kind].rank[index], index });
  byId("found").textContent = `${visited + 1} of ${found.length.toLocaleString("en")}`;
}

byId("search").addEventListener("input", (event) => search(event.target.value));
byId("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") visitMatch(event.shiftKey ? -1 : 1);
  if (event.key === "Escape") {
    event.target.value = "";
    search("");
    canvas.focus();
  }
  event.stopPropagation();
});
