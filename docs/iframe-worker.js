// A Worker in an iframe, for the search: browsers start no real one for pages that are opened from the disk (file://).
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = (this.inner = frame.contentWindow)
      inner.document.open()
      inner.document.write("<!doctype html><body></body>")
      inner.document.close()
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inner.document.createElement("script")
          Object.assign(script, { src: source, onload: resolve, onerror: reject })
          inner.document.body.append(script)
        })
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inner.importScripts = async (...sources) => {
        for (const source of sources) await load(source)
      }
      this.loaded = load(url)
    }
    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })))
    }
    terminate() {
      this.inner.frameElement.remove()
    }
  }
}
