//go:build scale

package main

import (
	"github.com/open-telemetry/opentelemetry-collector-contrib/exporter/kafkaexporter"
	"github.com/open-telemetry/opentelemetry-collector-contrib/exporter/loadbalancingexporter"
	"github.com/open-telemetry/opentelemetry-collector-contrib/processor/groupbyattrsprocessor"
	"github.com/open-telemetry/opentelemetry-collector-contrib/processor/transformprocessor"
	"github.com/open-telemetry/opentelemetry-collector-contrib/receiver/kafkareceiver"
)

func init() {
	moreReceivers = append(moreReceivers, kafkareceiver.NewFactory())
	moreProcessors = append(moreProcessors,
		groupbyattrsprocessor.NewFactory(),
		transformprocessor.NewFactory(),
	)
	moreExporters = append(moreExporters,
		kafkaexporter.NewFactory(),
		loadbalancingexporter.NewFactory(),
	)
}
