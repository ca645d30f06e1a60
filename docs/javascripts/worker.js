// Lets the search work on pages that are opened as files: browsers start no Worker from file:// there. This one
// runs the worker's script in a hidden frame. The theme's search looks for the name `IFrameWorker`.
(() => {
  if (location.protocol !== "file:") return

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = (this.inside = frame.contentWindow)
      const load = (source) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script")
          script.src = new URL(source, document.baseURI)
          script.onload = done
          script.onerror = failed
          inside.document.head.appendChild(script)
        })
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...sources) => Promise.all(sources.map(load))
      load(url).then(
        () => {
          this.ready = true
          for (const data of this.waiting.splice(0)) this.postMessage(data)
        },
        () => this.dispatchEvent(new Event("error")),
      )
    }

    postMessage(data) {
      if (this.ready) this.inside.dispatchEvent(new MessageEvent("message", { data }))
      else this.waiting.push(data)
    }
  }

  window.IFrameWorker = window.Worker = IFrameWorker
})()
