// Loaded before the body of the page. Without it, a form that is submitted before stoker.js has loaded would be
// sent by the browser itself: away from the page, with its fields in the address. stoker.js submits it again.

const early = new Map();

function keep(event) {
  if (!event.target.matches("[data-json]")) return;
  event.preventDefault();
  early.set(event.target, event.submitter);
}

document.addEventListener("submit", keep);
