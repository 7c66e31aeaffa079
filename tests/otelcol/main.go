// OpenTelemetry's collector with the parts that the tests use: OTLP in, OTLP over HTTP out.
package main

import (
	"log"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/provider/fileprovider"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/exporter/otlphttpexporter"
	"go.opentelemetry.io/collector/otelcol"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/service/telemetry/otelconftelemetry"
)

func factories() (otelcol.Factories, error) {
	in, out := otlpreceiver.NewFactory(), otlphttpexporter.NewFactory()
	return otelcol.Factories{
		Receivers: map[component.Type]receiver.Factory{in.Type(): in},
		Exporters: map[component.Type]exporter.Factory{out.Type(): out},
		Telemetry: otelconftelemetry.NewFactory(),
	}, nil
}

func main() {
	files := []confmap.ProviderFactory{fileprovider.NewFactory()}
	settings := otelcol.CollectorSettings{
		BuildInfo: component.BuildInfo{Command: "otelcol", Description: "OTLP to OTLP over HTTP", Version: "tests"},
		Factories: factories,
		ConfigProviderSettings: otelcol.ConfigProviderSettings{
			ResolverSettings: confmap.ResolverSettings{ProviderFactories: files, DefaultScheme: "file"},
		},
	}
	if err := otelcol.NewCommand(settings).Execute(); err != nil {
		log.Fatal(err)
	}
}
