// Shows an answer. All text is set as text content, so that class names cannot become markup.
import { clearHeat, heatPicture, setStrength, showHeat } from "./heat.js";
import { labels, percent } from "./format.js";

const main = document.querySelector("main");
const result = document.getElementById("result");
const strength = document.getElementById("strength");
const MOST_BARS = 10; // further classes are folded
const FLAT = 1.05; // times the uniform weight: below it, a weight shows no similarity

let shown = null; // the answer on the page and its file name

strength.addEventListener("input", applyStrength);
document.getElementById("download-json").addEventListener("click", () => {
  const { picture, ...kept } = shown.answer; // without the image
  save(new Blob([JSON.stringify({ file: shown.name, ...kept }, null, 1)], { type: "application/json" }), "json");
});
document.getElementById("download-picture").addEventListener("click", async () => {
  save(await heatPicture(shown.answer, shown.name, Number(strength.value) / 100), "png");
});

export async function show(answer, name) {
  const picture = document.getElementById("picture");
  picture.src = answer.picture;
  await picture.decode();
  picture.alt = `Your image, ${name}`;
  picture.parentElement.style.setProperty("--ratio", picture.naturalWidth / picture.naturalHeight);
  shown = { answer, name };
  result.hidden = false;
  showVerdict(answer);
  showBars(answer);
  await showImage(answer);
  await showSimilar(answer);
}

export function clear() {
  shown = null;
  result.hidden = true;
}

function showVerdict(answer) {
  const several = answer.label.split("|").length > 1 || answer.label === "";
  document.getElementById("sureness").textContent = answer.sureness;
  const prediction = document.getElementById("prediction");
  prediction.textContent = labels(answer);
  const refused = Boolean(answer.ood?.refused);
  const rule = answer.rule === "accuracy" ? "" : `, by the rule ${answer.rule}`;
  if (!several && !refused) prediction.append(" ", element("small", percent(answer.confidence) + rule));
  prediction.closest(".verdict").classList.toggle("unsure", refused || answer.confidence < 0.5);
  showSet(refused ? null : answer.set);
  document.getElementById("explanation").replaceChildren(...answer.words.map((line) => element("p", line)));
}

// The classes that contain the true one with a chosen probability, as chips.
function showSet(found) {
  const line = document.getElementById("set");
  line.hidden = !found;
  if (!found) return;
  const level = percent(found.level).replace(".0%", "%");
  const alone = found.classes.length === 1;
  const title = element("span", alone ? `Only possible class at ${level}:` : `Possible classes at ${level}:`, "muted");
  line.replaceChildren(title, ...found.classes.map((name) => element("span", name, "chip")));
  line.title = `On images like those of the evaluation, such a set contains the true class in ${level} of cases.`;
}

function showBars(answer) {
  const shares = answer.probabilities.map((one) => [one.name, one.probability]);
  const chosen = answer.label.split("|");
  const parts = [barTable(answer.ood?.refused ? "Probabilities, not to be used" : "Probability of each class", shares.slice(0, MOST_BARS), chosen)];
  if (shares.length > MOST_BARS) {
    const rest = document.createElement("details");
    rest.append(element("summary", `The other ${shares.length - MOST_BARS} classes`));
    rest.append(barTable("Probability of the other classes", shares.slice(MOST_BARS), chosen));
    parts.push(rest);
  }
  document.getElementById("bars").replaceChildren(...parts);
}

function barTable(title, shares, chosen) {
  const table = element("table", "", "bars");
  const longest = Math.max(...shares.map(([name]) => name.length));
  const word = Math.max(...shares.flatMap(([name]) => name.split(/[\s-]+/)).map((one) => one.length));
  table.style.setProperty("--name", `${Math.min(Math.max(longest + 1, 3), Math.max(word + 1, 17), 24)}ch`); // no broken words
  const caption = document.createElement("caption");
  caption.append(element("span", title));
  const body = document.createElement("tbody");
  shares.forEach(([name, share]) => {
    const line = element("tr", "", chosen.includes(name) ? "first" : "");
    const head = element("th", name);
    head.scope = "row";
    const cell = element("td", "", "bar");
    cell.setAttribute("aria-hidden", "true"); // the number beside it has the same content
    cell.append(track(share));
    line.append(head, cell, element("td", percent(share), "n"));
    body.append(line);
  });
  table.append(caption, body);
  return table;
}

async function showImage(answer) {
  const { left, top, width, height } = answer.seen;
  const position = { left, top, width, height };
  const frame = document.querySelector(".stage .seen");
  frame.hidden = width > 0.999 && height > 0.999;
  for (const box of [frame, document.getElementById("heat")]) {
    for (const [side, share] of Object.entries(position)) box.style[side] = `${100 * share}%`;
  }
  const caption = frame.hidden ? [] : ["The model sees the region inside the frame."];
  if (answer.heat) {
    await showHeat(answer.heat.png);
    applyStrength();
    caption.unshift(`The evidence for ${answer.heat.of} is ${answer.heat.where}.`);
  } else {
    clearHeat();
    if (!main.dataset.heat) caption.unshift("Heat maps are not available for this network.");
  }
  document.getElementById("strength-row").hidden = !answer.heat;
  document.getElementById("caption").textContent = caption.join(" ");
}

function applyStrength() {
  setStrength(Number(strength.value) / 100);
  const text = strength.value === "0" ? "off" : `${strength.value}%`;
  document.getElementById("strength-value").textContent = text;
  strength.setAttribute("aria-valuetext", text);
}

// Shows the predicted class and the most similar classes, with example images if they may be shown.
async function showSimilar(answer) {
  const several = answer.label.split("|").length > 1 || answer.label === "";
  const first = several ? answer.probabilities[0].name : answer.label;
  const soft = answer.similar.length > 0;
  const others = soft ? answer.similar : answer.probabilities.filter((one) => one.name !== first).slice(0, 2).map((one) => ({ name: one.name }));
  const withPictures = Boolean(main.dataset.examples);
  document.getElementById("similar").hidden = !soft && !withPictures;
  document.getElementById("similar-title").textContent = soft ? `Classes most easily confused with ${first}` : "Examples of the most probable classes";
  document.getElementById("similar-text").textContent = [
    soft ? `The weight of a class in the soft label of ${first} measures how similar the two look to the model. The line in the middle of a bar is the weight that all other classes would have without similarity.` : "",
    soft && others.every((one) => one.relative < FLAT) ? "All weights are close to it: the model has learned no similarity for this class." : "",
    withPictures ? "The pictures are training images." : "",
  ].filter(Boolean).join(" ");
  const cards = [...(withPictures ? [{ name: first }] : []), ...others];
  document.getElementById("similar-list").replaceChildren(
    ...(await Promise.all(cards.map((one) => card(one, withPictures, first)))),
  );
}

async function card({ name, weight, relative }, withPictures, first) {
  const item = document.createElement("li");
  item.append(element("h3", name));
  const line = element("p", "", "weight");
  if (weight !== undefined) line.append(relativeBar(relative), element("span", `${relative.toFixed(2)} × uniform, weight ${percent(weight)}`));
  else if (name === first) line.append(element("span", "predicted"));
  if (line.children.length) item.append(line);
  if (withPictures) item.append(await thumbs(name));
  return item;
}

async function thumbs(name) {
  const row = element("div", "", "thumbs");
  const response = await fetch(`examples/${classes().indexOf(name)}`);
  if (!response.ok) return row;
  const { pictures } = await response.json();
  pictures.forEach((source, index) => {
    const picture = document.createElement("img");
    picture.src = source;
    picture.alt = `${name}, example ${index + 1}`;
    row.append(picture);
  });
  return row;
}

const classes = () => JSON.parse(main.dataset.classes);

function track(share) {
  const outer = element("span", "", "track");
  const inner = document.createElement("i");
  inner.style.width = `${100 * share}%`;
  outer.append(inner);
  return outer;
}

// A weight relative to uniform, from the middle of the bar: full at none and at twice the uniform weight.
function relativeBar(relative) {
  const outer = element("span", "", "relative");
  const inner = element("i", "", relative < 1 ? "less" : "");
  const end = 50 * Math.min(relative, 2);
  inner.style.left = `${Math.min(end, 50)}%`;
  inner.style.right = `${100 - Math.max(end, 50)}%`;
  outer.setAttribute("aria-hidden", "true"); // the number beside it has the same content
  outer.append(inner, document.createElement("b"));
  return outer;
}

function element(tag, text, kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function save(blob, extension) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${shown.name.replace(/\.[^.]*$/, "").replace(/[^\p{L}\p{N}_-]+/gu, "_") || "image"}-result.${extension}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
