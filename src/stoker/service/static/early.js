// Loaded before the page is drawn. A form that is sent before stoker.js is there is kept for it: the browser's
// own way would leave the page, with what was typed in the address.

const early = new Map();

function keep(event) {
  if (!event.target.matches("[data-json]")) return;
  event.preventDefault();
  early.set(event.target, event.submitter);
}

document.addEventListener("submit", keep);
