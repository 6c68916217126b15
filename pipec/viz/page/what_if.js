// What if: sliders over a grid of other ways to run the step, each of which was played before the page was made.

let choice = []; // the position on each axis

/** The cell of these positions; undefined if it was not played. */
const cellAt = (positions) => data.whatIf.cells.find(([at]) => at.every((position, k) => position === positions[k]));

/** The cell in which one axis has this choice, and all others are as they are now. */
function alternativeCell(name, wanted) {
  const axes = data.whatIf?.axes ?? [];
  const axis = axes.findIndex(([each]) => each === name), position = axis < 0 ? -1 : axes[axis][1].indexOf(wanted);
  return position < 0 ? undefined : cellAt(axes.map((_, k) => (k === axis ? position : 0)));
}

/** The positions of an axis in ascending order of what they stand for; the first is as it is now. */
function ascending(choices) {
  const value = (text) => (text === "as it is" ? 1 : parseFloat(text));
  const order = choices.map((_, k) => k);
  return choices.some((text) => Number.isNaN(value(text))) || /^[^\d]*1f1b/.test(choices.join()) ? order : order.sort((one, other) => value(choices[one]) - value(choices[other]));
}

function fillWhatIf() {
  const { axes, notes } = data.whatIf;
  if (!choice.length) choice = axes.map(() => 0);
  byId("sliders").replaceChildren(...axes.map(([name, choices], axis) => {
    const order = ascending(choices);
    const label = make("output", {}, choices[choice[axis]]);
    const slider = make("input", {
      type: "range", min: "0", max: String(choices.length - 1), step: "1", value: String(order.indexOf(choice[axis])),
      attributes: { "aria-label": name, "aria-valuetext": choices[choice[axis]], "data-axis": name },
    });
    slider.addEventListener("input", () => {
      choice[axis] = order[+slider.value];
      label.textContent = choices[choice[axis]];
      slider.setAttribute("aria-valuetext", choices[choice[axis]]);
      answerWhatIf();
    });
    return make("label", {}, make("span", {}, name), slider, label);
  }));
  byId("notes").textContent = notes.join(" ");
  const single = data.whatIf.cells.filter(([positions]) => positions.filter(Boolean).length === 1);
  byId("best").replaceChildren(
    make("h2", {}, `One change alone, the most helpful first (${data.whatIf.cells.length} combinations were played)`),
    cellsTable(single.sort((one, other) => one[1] - other[1])));
  answerWhatIf();
  byId("alternatives").replaceChildren(...(data.pipeline?.alternatives.length ? [make("h2", {}, "What the compiler tried and did not take"), alternativesTable()] : []));
}

function cellsTable(cells) {
  const rows = cells.map(([positions, makespan, idle, inFlight]) => {
    const take = () => {
      choice = [...positions];
      fillWhatIf();
    };
    return [make("button", { className: "plain", onclick: take }, changesWords(positions)), duration(makespan), changeOf(makespan), percent(idle), String(inFlight)];
  });
  return simpleTable(["change", "step", "against now", "idle", "most in flight"], rows);
}

const changesWords = (positions) =>
  data.whatIf.axes.flatMap(([name, choices], k) => (positions[k] ? [`${name}: ${choices[positions[k]]}`] : [])).join(", ") || "as it is now";

function changeOf(makespan) {
  const now = data.whatIf.cells[0][1], ratio = makespan / now;
  return Math.abs(ratio - 1) < 5e-4 ? "the same" : ratioWords(ratio);
}

function answerWhatIf() {
  const cell = cellAt(choice);
  byId("answer").textContent = cell
    ? `${capital(changesWords(choice))}: a step takes ${duration(cell[1])}${choice.some(Boolean) ? `, ${changeOf(cell[1])}` : ""}; ranks are idle for ${percent(cell[2])} of it, with at most ${cell[3]} in flight.`
    : "This combination was not played. Put a slider back to where it was.";
}

function alternativesTable() {
  const rows = data.pipeline.alternatives.map(({ schedule, microbatches, stages, seconds, peak, rejected }) =>
    [schedule, String(microbatches), String(stages), duration(seconds), bytes(peak), rejected]);
  return simpleTable(["schedule", "microbatches", "stages", "step", "peak memory", "not taken because"], rows);
}

function simpleTable(head, rows) {
  return make("div", { className: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((words) => make("td", {}, words)))))));
}
