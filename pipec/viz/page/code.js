// Code: the program of a rank beside the code of a stage, with the instruction of the selected cell marked.

const code = { rank: 0, stage: 0, line: -1, instruction: -1 };

function fillCode() {
  const { programs, sources } = data.pipeline;
  const choices = (element, names, chosen) =>
    element.replaceChildren(...names.map((name, k) => make("option", { value: String(k), selected: k === chosen }, name)));
  choices(byId("programs"), programs.map(({ rank }) => `rank ${rank}`), code.rank);
  choices(byId("sources"), sources.map((_, stage) => `stage_${stage}.py`), code.stage);
  byId("programs").parentElement.hidden = !programs.length;
  drawProgram();
  drawSource();
}

/** Lines as text, with their numbers from `first`; the marked ones are brought into view. */
function listing(element, lines, first, marked, onclick) {
  const rows = lines.map((text, k) => {
    const comment = text.indexOf("# ");
    const parts = comment < 0 ? [text] : [text.slice(0, comment), make("em", {}, text.slice(comment))];
    const row = make("span", { className: marked.has(k) ? "line marked" : "line" }, make("i", {}, String(k + first)), ...parts, "\n");
    if (onclick) row.onclick = () => onclick(k);
    return row;
  });
  element.replaceChildren(...rows);
  const top = rows[Math.min(...marked)];
  if (top) element.scrollTop = top.offsetTop - element.offsetTop - element.clientHeight / 3;
}

function drawProgram() {
  const program = data.pipeline.programs[code.rank];
  if (!program) return;
  const lines = program.lines.map((line) => line.replace(/^ *\d+ {2}/, ""));
  listing(byId("program"), lines, 0, new Set(code.instruction >= 0 ? [code.instruction] : []));
}

function drawSource() {
  const lines = data.pipeline.sources[code.stage].split("\n");
  listing(byId("source"), lines, 1, new Set(code.line >= 0 ? [code.line] : []), (k) => {
    code.line = k;
    drawSource();
  });
  const origin = code.line < 0 ? null : originOf(lines, code.line);
  if (!origin) return byId("origin").replaceChildren("click a line to see where it comes from");
  byId("origin").replaceChildren(
    make("b", {}, `${origin.module}${origin.type ? ` · ${origin.type}` : ""}${origin.source ? `, ${origin.source}` : ""}`),
    make("button", { onclick: () => searchFor(`stage ${code.stage}`) }, "its cells"));
}

/** The module and the line of the model that a line of code comes from: the comment above it says so. */
function originOf(lines, from) {
  for (let k = from; k >= 0 && !lines[k].startsWith("def "); k--) {
    const match = /^\s+# (\S.*?)(?: · (.*?))?(?:\s{2,}# (\S+:\d+))?\s*$/.exec(lines[k]);
    if (match) return { module: match[1], type: match[2], source: match[3] };
  }
  return null;
}

/** The line of the program that is compute `index`, or -1. */
function instructionOf(timeline, rank, index) {
  const { computes, first } = timeline;
  const program = data.pipeline.programs[timeline.numbers[rank]];
  if (!program) return -1;
  if (program.blocking.length === first[rank + 1] - first[rank]) return program.blocking[index - first[rank]];
  const { key } = data.phases[computes.phase[index]];
  const microbatch = computes.microbatch[index], segment = computes.segment[index];
  const wanted = `${key} stage ${computes.stage[index]} ${microbatch < 0 ? "" : `mb ${microbatch} `}${segment < 0 ? "" : `segment ${segment} `}`;
  return program.lines.findIndex((line) => `${line.replace(/^ *\d+ +/, "").replace(/ +/g, " ")} `.startsWith(wanted));
}

/** Open the program of the rank at a cell, and the function of its stage. */
function showCode(timeline, rank, index) {
  const { phase, segment, stage } = timeline.computes;
  const name = data.phases[phase[index]].key + (segment[index] < 0 ? "" : `_${segment[index]}`);
  code.rank = Math.min(timeline.numbers[rank], Math.max(data.pipeline.programs.length - 1, 0));
  code.instruction = instructionOf(timeline, rank, index);
  showLine(stage[index], data.pipeline.sources[stage[index]].split("\n").findIndex((line) => line.startsWith(`def ${name}(`)));
}

/** Open a line of a stage's code, from 0. */
function showLine(stage, line) {
  code.stage = stage;
  code.line = line;
  openTab("code");
  fillCode();
}

byId("programs").addEventListener("change", (event) => {
  code.rank = +event.target.value;
  code.instruction = -1;
  drawProgram();
});
byId("sources").addEventListener("change", (event) => {
  code.stage = +event.target.value;
  code.line = -1;
  drawSource();
});
