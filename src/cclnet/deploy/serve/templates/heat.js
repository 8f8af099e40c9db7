// The heat map: sent in grey, shown in colours on the page and in the downloaded picture.
import { labels, percent } from "./format.js";

// The colours of `cclnet predict --explain`. They also differ in brightness, for colour-blind readers.
const COLOURS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const canvas = document.getElementById("heat");

export async function showHeat(png) {
  const grey = new Image();
  grey.src = png;
  await grey.decode();
  canvas.width = grey.naturalWidth;
  canvas.height = grey.naturalHeight;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(grey, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < pixels.data.length; at += 4) {
    const heat = pixels.data[at] / 255;
    const position = heat * (COLOURS.length - 1);
    const below = Math.min(Math.floor(position), COLOURS.length - 2);
    for (let channel = 0; channel < 3; channel++) {
      const [low, high] = [COLOURS[below][channel], COLOURS[below + 1][channel]];
      pixels.data[at + channel] = low + (high - low) * (position - below);
    }
    pixels.data[at + 3] = 255 * heat; // transparent where there is no evidence for the class
  }
  context.putImageData(pixels, 0, 0);
}

export function clearHeat() {
  canvas.width = canvas.height = 0;
}

export function setStrength(share) {
  canvas.style.opacity = share;
}

// Returns a PNG of the image with the heat map at the opacity of the page, and the prediction below it.
export async function heatPicture(answer, name, strength) {
  const image = document.getElementById("picture");
  const width = 720;
  const height = Math.round((width * image.naturalHeight) / image.naturalWidth);
  const rows = answer.probabilities.slice(0, 5);
  const drawing = document.createElement("canvas");
  drawing.width = width;
  drawing.height = height + 160 + 30 * rows.length;
  const context = drawing.getContext("2d");
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, drawing.width, drawing.height);
  context.drawImage(image, 0, 0, width, height);
  if (canvas.width) {
    const { left, top, width: share, height: high } = answer.seen;
    context.globalAlpha = strength;
    context.drawImage(canvas, left * width, top * height, share * width, high * height);
    context.globalAlpha = 1;
  }
  drawAnswer(context, answer, name, rows, height, width);
  return new Promise((done) => drawing.toBlob(done, "image/png"));
}

function drawAnswer(context, answer, name, rows, below, width) {
  const font = (size, weight = 400) => `${weight} ${size}px system-ui, "Liberation Sans", Arial, sans-serif`;
  const write = (text, x, y, style, colour = "#1b1f24", maxWidth = width - x - 24) => {
    context.font = style;
    context.fillStyle = colour;
    context.fillText(text, x, y, maxWidth);
  };
  write(`${answer.sureness}: ${labels(answer)}`, 24, below + 40, font(26, 650));
  rows.forEach((row, index) => {
    const y = below + 78 + 30 * index;
    write(row.name, 24, y, font(17), "#1b1f24", 200);
    context.fillStyle = "#f5f7f9";
    context.fillRect(236, y - 14, 370, 17);
    context.fillStyle = index ? "#6a6f75" : "#0072b2";
    context.fillRect(236, y - 14, Math.max(2, 370 * row.probability), 17);
    write(percent(row.probability), 622, y, font(17));
  });
  const foot = below + 92 + 30 * rows.length;
  write(`${name}, model ${answer.model}`, 24, foot + 8, font(14), "#57606a");
  const [first, ...rest] = answer.notice.split(/(?<=\.) /);
  [first, rest.join(" ")].forEach((line, row) => write(line, 24, foot + 30 + 20 * row, font(13), "#57606a"));
}
