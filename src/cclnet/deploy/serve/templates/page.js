// An image comes in by drop, by paste or by choice; it is sent; the answer, or the reason why there is none, is shown.
import { forget, show } from "./show.js";
import { labels } from "./words.js";

const main = document.querySelector("main");
const file = document.getElementById("file");
const status = document.getElementById("status");
const trouble = document.getElementById("trouble");
let asked = null; // the request under way, so that a new image ends it

file.addEventListener("change", () => {
  if (file.files.length) ask(file.files[0]);
  file.value = ""; // the same file can be chosen again
});

document.addEventListener("paste", (event) => {
  const pasted = [...(event.clipboardData?.files ?? [])];
  if (!pasted.length) return;
  event.preventDefault();
  ask(pasted[0]);
});

let inside = 0; // elements entered and not left: only at zero has the drag left the window
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  window.addEventListener(name, (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    inside = name === "drop" ? 0 : inside + (name === "dragenter") - (name === "dragleave");
    main.classList.toggle("over", inside > 0);
    if (name === "drop" && event.dataTransfer.files.length) ask(event.dataTransfer.files[0]);
  });
}

async function ask(image) {
  asked?.abort();
  const own = (asked = new AbortController());
  const name = image.name || "the pasted image";
  trouble.hidden = true;
  if (image.size > Number(main.dataset.bytes)) {
    refuse(name, `The file is larger than ${main.dataset.megabytes}, which is the limit here.`);
    return;
  }
  status.textContent = `Looking at ${name} …`;
  main.classList.add("busy");
  try {
    const form = new FormData();
    form.append("image", image, "image"); // its name stays here
    const response = await fetch("predict?explain=true&picture=true", { method: "POST", body: form, signal: own.signal });
    const answer = await response.json();
    if (response.status === 401) location.reload(); // the server was started anew: sign in again
    else if (!response.ok) refuse(name, answer.reason);
    else {
      await show(answer, name);
      main.classList.add("answered");
      document.querySelector(".by-hand strong").textContent = "Drop another image here";
      status.textContent = `${name}: ${labels(answer)}, ${answer.sureness.toLowerCase()}.`;
    }
  } catch (error) {
    if (error.name !== "AbortError") refuse(name, "The server cannot be reached, or has not understood. Is it running?");
  } finally {
    if (asked === own) main.classList.remove("busy");
  }
}

function refuse(name, reason) {
  forget();
  main.classList.remove("busy", "answered");
  status.textContent = "";
  const title = document.createElement("strong");
  title.textContent = `There is no answer for ${name}.`;
  const words = document.createElement("p");
  words.textContent = reason;
  trouble.replaceChildren(title, words);
  trouble.hidden = false;
}
