// Upload of an image by drop, paste or file chooser; shows the answer, or the reason why it was refused.
import { clear, show } from "./show.js";
import { labels } from "./format.js";

const main = document.querySelector("main");
const file = document.getElementById("file");
const status = document.getElementById("status");
const errorBox = document.getElementById("error");
let current = null; // the request in progress; a new image aborts it

file.addEventListener("change", () => {
  if (file.files.length) send(file.files[0]);
  file.value = ""; // the same file can be chosen again
});

document.addEventListener("paste", (event) => {
  const pasted = [...(event.clipboardData?.files ?? [])];
  if (!pasted.length) return;
  event.preventDefault();
  send(pasted[0]);
});

let depth = 0; // elements entered and not left; at zero the drag has left the window
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  window.addEventListener(name, (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    depth = name === "drop" ? 0 : depth + (name === "dragenter") - (name === "dragleave");
    main.classList.toggle("over", depth > 0);
    if (name === "drop" && event.dataTransfer.files.length) send(event.dataTransfer.files[0]);
  });
}

async function send(image) {
  current?.abort();
  const own = (current = new AbortController());
  const name = image.name || "the pasted image";
  errorBox.hidden = true;
  if (image.size > Number(main.dataset.bytes)) {
    showError(name, `The file is larger than ${main.dataset.megabytes}, the limit of this server.`);
    return;
  }
  status.textContent = `Processing ${name} …`;
  main.classList.add("busy");
  try {
    const form = new FormData();
    form.append("image", image, "image"); // the file name is not sent
    const response = await fetch("predict?explain=true&picture=true", { method: "POST", body: form, signal: own.signal });
    const answer = await response.json();
    if (response.status === 401) location.reload(); // the server was restarted: sign in again
    else if (!response.ok) showError(name, answer.reason);
    else {
      await show(answer, name);
      main.classList.add("answered");
      document.querySelector(".by-mouse strong").textContent = "Drop another image here";
      status.textContent = `${name}: ${labels(answer)}, ${answer.sureness.toLowerCase()}.`;
    }
  } catch (error) {
    if (error.name !== "AbortError") showError(name, "The server did not answer. Is it still running?");
  } finally {
    if (current === own) main.classList.remove("busy");
  }
}

function showError(name, reason) {
  clear();
  main.classList.remove("busy", "answered");
  status.textContent = "";
  const title = document.createElement("strong");
  title.textContent = `${name} could not be processed.`;
  const text = document.createElement("p");
  text.textContent = reason;
  errorBox.replaceChildren(title, text);
  errorBox.hidden = false;
}
